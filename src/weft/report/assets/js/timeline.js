// One timeline of the page: its data, its view, and the drawing of both.

class Timeline {
  constructor(root) {
    this.root = root;
    this.payload = JSON.parse(document.getElementById(root.dataset.source).textContent);
    this.rows = decodeRows(this.payload);
    this.layout = layOut(this.rows);
    this.view = new View(this.payload.end);
    this.stage = root.querySelector(".stage");
    this.canvas = root.querySelector(".spans");
    this.overview = root.querySelector(".overview");
    this.range = root.querySelector(".range");
    this.row = 0;
    root.hidden = false;
    root.querySelector(".spacer").style.height = `${this.layout.height}px`;
    this.hover = new Hover(this.stage, this.payload);
    this.view.listeners.push(() => { this.hover.hide(); this.tell(); this.schedule(); });
    this.recolour();
  }

  recolour() {
    this.colours = readColours(this.root);
    this.tell();
    this.draw();
  }

  size() {
    const width = this.stage.clientWidth;
    const height = this.stage.clientHeight || this.layout.height;
    return { width, height, gutter: width < 560 ? 74 : 108, scroll: this.stage.scrollTop };
  }

  schedule() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    const size = this.size();
    const context = sharpen(this.canvas, size.width, size.height);
    paintRows(context, this.rows, this.layout, this.view, size, this.colours, this.payload.names);
    paintOverview(this.overview, this.payload.overview, this.view, size.gutter, this.colours);
  }

  // The range in words for everyone, and in exact nanoseconds for scripts.
  tell() {
    const { view, root } = this;
    root.dataset.from = String(Math.round(view.from));
    root.dataset.to = String(Math.round(view.to));
    const whole = view.width >= view.end;
    this.range.textContent = whole
      ? `Showing all ${formatTime(view.end)}`
      : `Showing ${formatTime(view.from)} to ${formatTime(view.to)}: ${formatTime(view.width)} of ${formatTime(view.end)}`;
  }

  momentAt(x) {
    const { width, gutter } = this.size();
    return this.view.from + (x - gutter) / (width - gutter) * this.view.width;
  }

  // The span under a point of the stage, in content coordinates; a short one may be missed by 3 pixels.
  hit(x, y) {
    const size = this.size();
    if (x < size.gutter - 3) return null;
    const tolerance = 3 * this.view.width / (size.width - size.gutter);
    const row = this.rows.find((candidate) => y >= candidate.y - 1 && y <= candidate.y + candidate.height + 1);
    if (!row) return null;
    const moment = this.momentAt(x);
    let best = null;
    for (const track of row.tracks) {
      const at = spanAt(track, moment, tolerance);
      if (at < 0) continue;
      const off = Math.max(track.start[at] - moment, moment - track.end[at], 0);
      const length = track.end[at] - track.start[at];
      if (!best || off < best.off || (off === best.off && length < best.length)) best = { row, track, at, off, length };
    }
    return best;
  }

  // Choose the next or previous span of the current row by time.
  step(direction) {
    const row = this.rows[this.row];
    const from = this.hover.chosen && this.hover.chosen.row === row
      ? this.hover.chosen.track.start[this.hover.chosen.at] : (direction > 0 ? this.view.from - 1 : this.view.to);
    this.choose(row, from, direction);
  }

  choose(row, from, direction) {
    let best = null;
    for (const track of row.tracks) {
      const at = direction > 0 ? firstOver(track.start, from) : firstOver(track.start, from - 0.5) - 1;
      if (at < 0 || at >= track.length) continue;
      if (!best || direction * (track.start[at] - best.track.start[best.at]) < 0) best = { track, at };
    }
    if (best) this.select(row, best.track, best.at);
  }

  // Bring one span into view, frame it and say what it is.
  select(row, track, at, after = "") {
    this.row = this.rows.indexOf(row);
    this.view.reveal(track.start[at], track.end[at]);
    this.stage.scrollTop = Math.min(this.stage.scrollTop, row.y - AXIS - HEADER);
    if (row.y + row.height > this.stage.scrollTop + this.stage.clientHeight) this.stage.scrollTop = row.y + row.height - this.stage.clientHeight + 8;
    this.hover.show(row, track, at, this.view, this.size());
    this.range.textContent = this.hover.text() + after;
  }

  // The page opens at the worst rank.
  openAtFirst() {
    const header = this.layout.headers.find(({ label }) => label === this.payload.first);
    if (header) this.stage.scrollTop = header.y - AXIS;
    const row = this.rows.findIndex((candidate) => candidate.group === this.payload.first);
    if (row >= 0) this.row = row;
  }
}
