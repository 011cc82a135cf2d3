// Numbers and elements. Text from a trace only ever goes through textContent.

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

function unitFor(ns) {
  return UNITS.find(([factor]) => Math.abs(ns) >= factor) || UNITS[3];
}

// Nanoseconds in the unit that suits them, to `digits` significant digits.
function formatTime(ns, digits = 4) {
  if (ns === 0) return "0";
  const [factor, unit] = unitFor(ns);
  const value = ns / factor;
  return `${Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 })} ${unit}`;
}

// A moment exact to the nanosecond, in microseconds.
function formatMoment(ns) {
  return `${(ns / 1e3).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 })} µs`;
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${Number(bytes.toPrecision(4))} ${units[at]}`;
}

// What fits on a span: the name without namespaces, template arguments and parameters.
function shortName(name) {
  const plain = name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").split(/[<(]/, 1)[0].split("::").pop();
  return plain.length > 3 ? plain : name;
}
