// What is under the pointer, or chosen by keyboard: a frame around the span and a tooltip.

const RESOURCE_NAMES = ["blocks", "threads per block", "registers per thread", "shared memory per block", "moved"];
const RESOURCE_BYTES = [false, false, false, true, true];

function describe(payload, row, track, at) {
  const facts = [];
  const merged = track.merged.get(at);
  const length = track.end[at] - track.start[at];
  const name = payload.names[track.name[at]];
  facts.push(["start", formatMoment(track.start[at])]);
  facts.push(["duration", `${formatTime(length, 6)} (${length.toLocaleString("en")} ns)`]);
  if (merged) {
    facts.push(["spans", merged.count.toLocaleString("en")]);
    facts.push(["busy", `${(100 * merged.busy / (length || 1)).toFixed(1)}% of it`]);
  }
  const reason = (payload.reasons || [])[track.reason[at]];
  if (reason) facts.push([merged ? "main cause" : "cause", `${reason[0]}: ${reason[1]}`]);
  facts.push(["where", row.exposed ? row.group : `${row.group}, ${row.label}`]);
  const resources = payload.resources[track.resource[at]] || [];
  resources.forEach((value, i) => {
    if (value >= 0 && !merged) facts.push([RESOURCE_NAMES[i], RESOURCE_BYTES[i] ? formatBytes(value) : value.toLocaleString("en")]);
  });
  const what = merged && row.exposed ? "exposed ranges" : KINDS[track.kind];
  return { kind: merged ? `${what}, merged` : what, name: name === undefined ? "" : name, longest: Boolean(merged), facts };
}

function fillTip(tip, said, kind) {
  const head = element("div", "tip-kind");
  head.append(element("i", `swatch kind-${kind}`), element("span", "", said.kind));
  const list = element("dl");
  for (const [label, value] of said.facts) list.append(element("dt", "", label), element("dd", "", value));
  const name = element("div", "tip-name", said.longest && said.name ? `longest: ${said.name}` : said.name);
  tip.replaceChildren(head, name, list);
}

class Hover {
  constructor(stage, payload) {
    this.stage = stage;
    this.payload = payload;
    this.tip = stage.parentElement.querySelector(".tip"); // outside of the stage, which clips its content
    this.mark = stage.querySelector(".mark");
    this.chosen = null;
  }

  hide() {
    this.tip.hidden = true;
    this.mark.hidden = true;
  }

  // Frame a span and say what it is; `x`, `y` is where to say it, in the stage's content coordinates.
  show(row, track, at, view, size, x, y) {
    this.chosen = { row, track, at };
    fillTip(this.tip, describe(this.payload, row, track, at), track.kind);
    const scale = (size.width - size.gutter) / view.width;
    const left = Math.max(size.gutter, size.gutter + (track.start[at] - view.from) * scale);
    const right = Math.min(size.width, size.gutter + (track.end[at] - view.from) * scale);
    this.mark.hidden = right < size.gutter || left > size.width;
    this.mark.style.transform = `translate(${left - 2}px, ${row.y - 2}px)`;
    this.mark.style.width = `${Math.max(right - left, 1) + 4}px`;
    this.mark.style.height = `${row.height + 4}px`;
    this.tip.hidden = false;
    this.place(x === undefined ? Math.min(Math.max(left, size.gutter), size.width) : x, y === undefined ? row.y + row.height : y, size);
  }

  place(x, y, size) {
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const across = Math.max(4, Math.min(x + 14, size.width - width - 4));
    const top = this.stage.offsetTop + y - size.scroll;
    const room = window.innerHeight - this.stage.parentElement.getBoundingClientRect().top;
    const down = top + 16 + height <= room || height + 12 > top ? top + 16 : top - height - 12;
    this.tip.style.transform = `translate(${across}px, ${down}px)`;
  }

  text() {
    if (!this.chosen) return "";
    const said = describe(this.payload, this.chosen.row, this.chosen.track, this.chosen.at);
    return `${said.kind}: ${said.name}; ${said.facts.map((fact) => fact.join(" ")).join(", ")}`;
  }
}
