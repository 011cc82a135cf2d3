// The columns of a timeline, decoded: starts come as differences, density spans as a short list.

const KINDS = ["compute", "communication", "memory", "exposed communication"];
const EXPOSED = 3;

function decodeTrack(raw) {
  const length = raw.s.length;
  const track = {
    kind: raw.kind, length,
    start: new Float64Array(length), end: new Float64Array(length), reach: new Float64Array(length),
    name: raw.n, resource: raw.r, reason: raw.c || [], merged: new Map(raw.m.map(([at, count, busy]) => [at, { count, busy }])),
  };
  let at = 0;
  let reach = -Infinity;
  for (let i = 0; i < length; i += 1) {
    at += raw.s[i];
    track.start[i] = at;
    track.end[i] = at + raw.d[i];
    reach = Math.max(reach, track.end[i]);
    track.reach[i] = reach; // the latest end so far: monotone, so the first visible span can be searched for
  }
  return track;
}

// Rows in drawing order; the tracks of one stream (one for each kind) share a row.
function decodeRows(payload) {
  const rows = [];
  for (const raw of payload.tracks) {
    const last = rows[rows.length - 1];
    const track = decodeTrack(raw);
    if (last && last.group === raw.group && last.row === raw.row) last.tracks.push(track);
    else rows.push({ group: raw.group, row: raw.row, label: raw.label, exposed: raw.kind === EXPOSED, tracks: [track] });
  }
  return rows;
}

// The first index whose value is greater than the limit, in a sorted array.
function firstOver(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The span of a track that covers a moment within a tolerance: the one that started last, so the innermost.
function spanAt(track, moment, tolerance) {
  const first = firstOver(track.reach, moment - tolerance);
  let nearest = -1;
  let distance = Infinity;
  for (let i = firstOver(track.start, moment + tolerance) - 1; i >= first; i -= 1) {
    const off = Math.max(track.start[i] - moment, moment - track.end[i], 0);
    if (off === 0) return i;
    if (off <= tolerance && off < distance) { nearest = i; distance = off; }
  }
  return nearest;
}
