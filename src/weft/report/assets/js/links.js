// From tables to the timeline and back, search, and exposed ranges by size.

const SAME_NAME = 30; // characters: names are shortened to fit the page

function sameName(a, b) {
  return Boolean(a) && Boolean(b) && a.slice(0, SAME_NAME) === b.slice(0, SAME_NAME);
}

function sizeOf({ track, at }) {
  return track.end[at] - track.start[at];
}

// Every exposed range of a timeline, the largest first.
function exposedBySize(timeline) {
  if (!timeline.bySize) {
    const found = [];
    for (const row of timeline.rows) {
      if (!row.exposed) continue;
      for (const track of row.tracks) for (let at = 0; at < track.length; at += 1) found.push({ row, track, at });
    }
    timeline.bySize = found.sort((a, b) => sizeOf(b) - sizeOf(a));
  }
  return timeline.bySize;
}

// Step through the exposed ranges of the current rank; the page opens at the worst one.
function stepBySize(timeline, direction) {
  const { group } = timeline.rows[timeline.row] || {};
  const found = exposedBySize(timeline).filter(({ row }) => row.group === group);
  if (!found.length) return;
  if (timeline.sizeGroup !== group) {
    timeline.sizeGroup = group;
    timeline.sizeAt = -1;
  }
  timeline.sizeAt = Math.min(Math.max(timeline.sizeAt + direction, 0), found.length - 1);
  const { row, track, at } = found[timeline.sizeAt];
  timeline.select(row, track, at, ` (${timeline.sizeAt + 1} of ${found.length} by size)`);
}

// The exposed range that a row of a table means: at its time, or the largest one of its name.
function goTo(timeline, place) {
  const timed = place.at_us !== undefined;
  let best = null;
  for (const candidate of exposedBySize(timeline)) {
    const { row, track, at } = candidate;
    if (row.group !== place.group) continue;
    if (!timed) {
      if (!sameName(timeline.payload.names[track.name[at]], place.name)) continue;
      best = candidate;
      break;
    }
    const off = Math.abs(track.start[at] - row.origin - place.at_us * 1000);
    if (!best || off < best.off) best = { ...candidate, off };
  }
  if (!best) return;
  timeline.root.scrollIntoView({ block: "center" });
  timeline.stage.focus({ preventScroll: true });
  timeline.select(best.row, best.track, best.at);
}

function showInTables(timeline) {
  const { chosen } = timeline.hover;
  if (!chosen) return;
  const name = timeline.payload.names[chosen.track.name[chosen.at]];
  const article = timeline.root.closest("article");
  for (const row of article.querySelectorAll("tr.found")) row.classList.remove("found");
  for (const row of article.querySelectorAll("section[id$=-collectives] tr[data-go]")) {
    const place = JSON.parse(row.dataset.go);
    if (place.group !== chosen.row.group || !sameName(place.name, name)) continue;
    row.closest("table").classList.remove("folded");
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
    return;
  }
}

function listenToLinks(timeline) {
  // Times in tables count from the first span of their rank.
  const origins = new Map();
  for (const row of timeline.rows) {
    for (const track of row.tracks) {
      if (track.length) origins.set(row.group, Math.min(origins.has(row.group) ? origins.get(row.group) : Infinity, track.start[0]));
    }
  }
  for (const row of timeline.rows) row.origin = origins.get(row.group) || 0;
  for (const row of timeline.root.closest("article").querySelectorAll("tr[data-go]")) {
    const go = () => goTo(timeline, JSON.parse(row.dataset.go));
    row.addEventListener("click", go);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") go(); });
  }
}

function matchesOf(timeline, text) {
  const matching = new Set();
  timeline.payload.names.forEach((name, i) => { if (name.toLowerCase().includes(text)) matching.add(i); });
  const found = [];
  for (const row of timeline.rows) {
    if (row.exposed) continue;
    for (const track of row.tracks) {
      for (let at = 0; at < track.length; at += 1) if (matching.has(track.name[at])) found.push({ row, track, at });
    }
  }
  return found;
}

function findNext(timeline, wanted) {
  const text = wanted.trim().toLowerCase();
  if (!text) return;
  if (timeline.sought !== text) {
    timeline.sought = text;
    timeline.foundAt = -1;
    timeline.matches = matchesOf(timeline, text);
  }
  const { matches } = timeline;
  if (!matches.length) {
    timeline.range.textContent = `Nothing found for “${wanted.trim()}”`;
    return;
  }
  timeline.foundAt = (timeline.foundAt + 1) % matches.length;
  const { row, track, at } = matches[timeline.foundAt];
  timeline.select(row, track, at, ` (${timeline.foundAt + 1} of ${matches.length})`);
}

function listenToSearch(timeline) {
  const box = timeline.root.querySelector(".find");
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    findNext(timeline, box.value);
  });
}
