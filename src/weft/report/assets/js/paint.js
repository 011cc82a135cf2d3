// Drawing: rows of spans on one canvas, the overview on another. Colours come from the legend, so from the theme.

const AXIS = 24;
const HEADER = 20;
const ROW = 22;
const STRIP = 14;
const STEP_GAP = 3;

function layOut(rows) {
  let y = AXIS;
  let group = null;
  const headers = [];
  for (const row of rows) {
    if (row.group !== group) {
      group = row.group;
      headers.push({ label: group, y });
      y += HEADER;
    }
    row.y = y;
    row.height = row.exposed ? STRIP : ROW;
    y += row.height + STEP_GAP;
  }
  return { headers, height: y + STEP_GAP };
}

function readColours(root) {
  const kinds = [0, 1, 2, 3].map((kind) => getComputedStyle(root.querySelector(`.swatch.kind-${kind}`)).backgroundColor);
  const stage = getComputedStyle(root.querySelector(".stage"));
  const muted = getComputedStyle(root.querySelector(".under")).color;
  return { kinds, inks: kinds.map(inkOn), font: stage.fontFamily, ink: stage.color, muted, line: stage.borderTopColor, surface: stage.backgroundColor };
}

// A canvas as sharp as the screen; drawing goes on in CSS pixels.
function sharpen(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function tickStep(range, count) {
  const rough = range / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function paintAxis(context, view, gutter, width, height, colours) {
  const step = tickStep(view.width, Math.max(2, (width - gutter) / 110));
  const [factor, unit] = unitFor(Math.max(view.to, 1));
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9));
  const scale = (width - gutter) / view.width;
  context.font = `11px ${colours.font}`;
  context.textBaseline = "middle";
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const x = Math.round(gutter + (at - view.from) * scale) + 0.5;
    context.fillStyle = colours.line;
    context.fillRect(x - 0.5, AXIS - 6, 1, height);
    context.fillStyle = colours.muted;
    if (x < width - 50) context.fillText(`${(at / factor).toFixed(Math.min(decimals, 9))} ${unit}`, x + 3, AXIS - 12);
  }
}

// Spans narrower than a pixel add up in their pixel, so that the shade is the share of time that was busy.
function paintTrack(context, track, row, y, view, gutter, width, colours, names) {
  const scale = (width - gutter) / view.width;
  const last = firstOver(track.start, view.to);
  context.fillStyle = colours.kinds[track.kind];
  let column = -1;
  let covered = 0;
  const flush = () => {
    if (covered > 0) {
      context.globalAlpha = Math.min(1, 0.25 + 0.75 * covered);
      context.fillRect(column, y, 1, row.height);
      context.globalAlpha = 1;
    }
    covered = 0;
  };
  for (let i = firstOver(track.reach, view.from); i < last; i += 1) {
    const left = Math.max(gutter, gutter + (track.start[i] - view.from) * scale);
    const right = Math.min(width, gutter + (track.end[i] - view.from) * scale);
    const density = track.merged.get(i);
    const busy = density ? density.busy / (track.end[i] - track.start[i] || 1) : 1;
    if (right - left < 1) {
      if (Math.floor(left) !== column) { flush(); column = Math.floor(left); }
      covered += (right - left) * busy;
      continue;
    }
    const high = density ? Math.max(2, row.height * busy) : row.height;
    context.globalAlpha = density ? 0.8 : 1;
    context.fillRect(left, y + row.height - high, Math.max(1, right - left - (right - left > 3 ? 0.6 : 0)), high);
    context.globalAlpha = 1;
    if (right - left > 46 && !row.exposed) {
      const label = density ? `×${density.count.toLocaleString("en")}` : shortName(names[track.name[i]] || "");
      paintLabel(context, label, left, right, y + row.height / 2, track.kind, colours);
      context.fillStyle = colours.kinds[track.kind];
    }
  }
  flush();
}

function paintLabel(context, label, left, right, middle, kind, colours) {
  const fit = Math.floor((right - left - 8) / 6.2);
  const text = label.length <= fit ? label : `${label.slice(0, Math.max(fit - 1, 1))}…`;
  context.save();
  context.beginPath();
  context.rect(left, middle - 12, right - left - 2, 24);
  context.clip();
  context.fillStyle = colours.inks[kind];
  context.font = `11px ${colours.font}`;
  context.fillText(text, left + 4, middle + 0.5);
  context.restore();
}

// Black or white, whichever can be read on the colour.
function inkOn(colour) {
  const [red, green, blue] = (colour.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111820" : "#ffffff";
}

function paintRows(context, rows, layout, view, size, colours, names) {
  const { gutter, width, height, scroll } = size;
  paintAxis(context, view, gutter, width, height, colours);
  for (const row of rows) {
    const y = row.y - scroll;
    if (y + row.height < AXIS || y > height) continue;
    for (const track of row.tracks) paintTrack(context, track, row, y, view, gutter, width, colours, names);
  }
  context.fillStyle = colours.surface;
  context.fillRect(0, AXIS, gutter - 4, height);
  context.font = `11px ${colours.font}`;
  for (const row of rows) {
    const y = row.y - scroll;
    if (y < AXIS - ROW || y > height) continue;
    context.fillStyle = row.exposed ? colours.kinds[EXPOSED] : colours.muted;
    context.fillText(row.label, 10, y + row.height / 2 + 0.5, gutter - 18);
  }
  for (const header of layout.headers) {
    const y = header.y - scroll;
    if (y < AXIS - HEADER || y > height) continue;
    context.fillStyle = colours.ink;
    context.font = `600 12px ${colours.font}`;
    context.fillText(header.label, 10, y + HEADER / 2 + 2, width - 20);
  }
  context.clearRect(0, 0, gutter - 4, AXIS - 6);
}

function paintOverview(canvas, overview, view, gutter, colours) {
  const width = canvas.clientWidth;
  const height = 36;
  const context = sharpen(canvas, width, height);
  const room = width - gutter;
  const bins = overview.compute.length;
  const bar = (value, colour, x) => {
    context.fillStyle = colour;
    const high = (height - 6) * Math.min(value, 1000) / 1000;
    if (high > 0) context.fillRect(x, height - 2 - high, 1, high);
  };
  for (let x = 0; x < room; x += 1) { // whole pixels, else neighbours of two colours blend into a third
    const i = Math.min(Math.floor(x * bins / room), bins - 1);
    bar(overview.compute[i] + overview.exposed[i], colours.kinds[EXPOSED], gutter + x);
    bar(overview.compute[i], colours.kinds[0], gutter + x);
  }
  context.fillStyle = colours.muted;
  context.font = `11px ${colours.font}`;
  context.textBaseline = "middle";
  context.fillText("overview", 10, height / 2, gutter - 18);
  const left = gutter + room * view.from / view.end;
  const right = gutter + room * view.to / view.end;
  context.globalAlpha = 0.55;
  context.fillStyle = colours.surface;
  context.fillRect(gutter, 0, left - gutter, height);
  context.fillRect(right, 0, width - right, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  context.strokeRect(left + 0.75, 1, Math.max(right - left - 1.5, 2), height - 2);
}
