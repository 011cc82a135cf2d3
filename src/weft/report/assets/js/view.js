// The visible range of a timeline, in nanoseconds, and who wants to know when it changes.

const SMALLEST_RANGE = 100;

class View {
  constructor(end) {
    this.end = Math.max(end, 1);
    this.from = 0;
    this.to = this.end;
    this.listeners = [];
  }

  get width() { return this.to - this.from; }

  show(from, to) {
    const width = Math.min(Math.max(to - from, Math.min(SMALLEST_RANGE, this.end)), this.end);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - width / 2, 0), this.end - width);
    this.to = this.from + width;
    for (const listener of this.listeners) listener();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const width = Math.min(Math.max(this.width * factor, Math.min(SMALLEST_RANGE, this.end)), this.end);
    const share = (around - this.from) / this.width;
    this.show(around - share * width, around + (1 - share) * width);
  }

  pan(share) {
    this.panBy(share * this.width);
  }

  panBy(ns) {
    this.show(this.from + ns, this.to + ns);
  }

  all() {
    this.show(0, this.end);
  }

  // Bring a span into view with some room around it, without zooming out further than needed.
  reveal(start, end) {
    const room = Math.max((end - start) * 4, SMALLEST_RANGE * 4);
    const width = Math.min(Math.max(room, end - start), this.width);
    if (start >= this.from && end <= this.to && end - start > this.width / 200) return;
    const middle = (start + end) / 2;
    const shown = Math.max(width, (end - start) * 1.5);
    this.show(middle - shown / 2, middle + shown / 2);
  }
}
