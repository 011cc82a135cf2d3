// Ranks over time: a row per rank, darker where more is exposed.

const MAP_HEIGHT = 420;
const MAP_ROW = 14;

class RankMap {
  constructor(root) {
    this.root = root;
    this.payload = JSON.parse(document.getElementById(root.dataset.source).textContent);
    this.cells = Uint8Array.from(atob(this.payload.cells), (c) => c.charCodeAt(0));
    this.canvas = root.querySelector("canvas");
    this.said = root.querySelector(".rank-at");
    root.hidden = false;
    this.canvas.addEventListener("pointermove", (event) => this.tell(this.at(event)));
    this.canvas.addEventListener("click", (event) => this.go(this.at(event)));
    this.draw();
  }

  // The colour of exposed time in the theme, as red, green and blue.
  colour() {
    const probe = element("i", "swatch kind-3");
    this.root.append(probe);
    const found = getComputedStyle(probe).backgroundColor;
    probe.remove();
    const dot = document.createElement("canvas").getContext("2d");
    dot.fillStyle = found;
    dot.fillRect(0, 0, 1, 1);
    return dot.getImageData(0, 0, 1, 1).data;
  }

  draw() {
    const { bins, ranks } = this.payload;
    const [red, green, blue] = this.colour();
    const small = document.createElement("canvas");
    small.width = bins;
    small.height = ranks.length;
    const context = small.getContext("2d");
    const image = context.createImageData(bins, ranks.length);
    for (let i = 0; i < this.cells.length; i += 1) {
      image.data.set([red, green, blue, this.cells[i]], 4 * i);
    }
    context.putImageData(image, 0, 0);
    const height = Math.max(40, Math.min(MAP_HEIGHT, ranks.length * MAP_ROW));
    this.canvas.width = Math.max(this.canvas.clientWidth, bins);
    this.canvas.height = height;
    this.canvas.style.height = `${height}px`;
    const target = this.canvas.getContext("2d");
    target.imageSmoothingEnabled = false;
    target.clearRect(0, 0, this.canvas.width, height);
    target.drawImage(small, 0, 0, this.canvas.width, height);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const { bins, ranks } = this.payload;
    const inside = (value, count) => Math.min(Math.max(Math.floor(value * count), 0), count - 1);
    return { row: inside((event.clientY - box.top) / box.height, ranks.length), bin: inside((event.clientX - box.left) / box.width, bins) };
  }

  tell({ row, bin }) {
    const { bins, ranks, end } = this.payload;
    const share = this.cells[row * bins + bin] / 255;
    this.said.textContent = `${ranks[row]}, from ${formatTime(bin * end / bins)}: ${(100 * share).toFixed(0)}% exposed`;
  }

  // To the rank in the timeline, at that time.
  go({ row, bin }) {
    const { bins, ranks, end } = this.payload;
    const timeline = timelines.find((one) => one.root.closest("article") === this.root.closest("article"));
    const header = timeline && timeline.layout.headers.find(({ label }) => label === ranks[row]);
    if (!header) {
      this.said.textContent = `${ranks[row]} is not drawn in the timeline: it is less exposed`;
      return;
    }
    timeline.view.show((bin - 1) * end / bins, (bin + 2) * end / bins);
    timeline.stage.scrollTop = header.y - AXIS;
    timeline.root.scrollIntoView({ block: "center" });
  }
}
