// Mouse, touch, buttons and keys.

const ZOOM = 1.5;

function listenToWheel(timeline) {
  const { stage, view } = timeline;
  stage.addEventListener("wheel", (event) => {
    // A page that cannot be scrolled past a chart is a nuisance: the plain wheel zooms once the timeline has focus.
    const focused = document.activeElement === stage;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) / stage.clientWidth);
    } else if (focused || event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const x = event.clientX - stage.getBoundingClientRect().left;
      view.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 250))), timeline.momentAt(x));
    } else {
      timeline.range.textContent = "Click the timeline, or hold Ctrl, to zoom with the wheel";
    }
  }, { passive: false });
}

function listenToPointer(timeline) {
  const { stage, view, hover } = timeline;
  const pointers = new Map();
  let pinch = 0;
  const place = (event) => {
    const box = stage.getBoundingClientRect();
    return { x: event.clientX - box.left - stage.clientLeft, y: event.clientY - box.top - stage.clientTop + stage.scrollTop };
  };
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return Math.max(Math.abs(a.x - b.x), 8);
  };
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, place(event));
    if (pointers.size === 2) pinch = spread();
    try { stage.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
  });
  stage.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      const found = timeline.hit(now.x, now.y);
      if (found) hover.show(found.row, found.track, found.at, view, timeline.size(), now.x, now.y);
      else hover.hide();
      return;
    }
    pointers.set(event.pointerId, now);
    if (pointers.size === 2) {
      const wide = spread();
      const [a, b] = [...pointers.values()];
      view.zoom(pinch / wide, timeline.momentAt((a.x + b.x) / 2));
      pinch = wide;
    } else if (now.x !== before.x) {
      const { width, gutter } = timeline.size();
      stage.classList.add("dragging");
      view.panBy((before.x - now.x) / (width - gutter) * view.width);
    }
  });
  const release = (event) => {
    const tapped = pointers.delete(event.pointerId) && !stage.classList.contains("dragging") && event.type === "pointerup";
    stage.classList.remove("dragging");
    if (!tapped) return;
    const now = place(event);
    const found = timeline.hit(now.x, now.y);
    if (!found) return;
    timeline.row = timeline.rows.indexOf(found.row);
    hover.show(found.row, found.track, found.at, view, timeline.size(), now.x, now.y);
  };
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);
  stage.addEventListener("pointerleave", () => hover.hide());
  stage.addEventListener("dblclick", (event) => view.zoom(1 / (ZOOM * ZOOM), timeline.momentAt(place(event).x)));
  stage.addEventListener("scroll", () => timeline.schedule());
}

function listenToOverview(timeline) {
  const { overview, view } = timeline;
  const go = (event) => {
    const { gutter, width } = timeline.size();
    const moment = (event.offsetX - gutter) / (width - gutter) * view.end;
    view.show(moment - view.width / 2, moment + view.width / 2);
  };
  overview.addEventListener("pointerdown", (event) => {
    // From the whole, a click in the overview means "here": show a tenth of it.
    if (view.width >= view.end) view.zoom(0.1);
    go(event);
    try { overview.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
  });
  overview.addEventListener("pointermove", (event) => { if (event.buttons & 1) go(event); });
}

function listenToKeys(timeline) {
  const { stage, view, hover } = timeline;
  const actions = {
    "+": () => view.zoom(1 / ZOOM), "=": () => view.zoom(1 / ZOOM),
    "-": () => view.zoom(ZOOM), "_": () => view.zoom(ZOOM),
    ArrowLeft: () => view.pan(-0.15), ArrowRight: () => view.pan(0.15),
    ArrowUp: () => moveRow(timeline, -1), ArrowDown: () => moveRow(timeline, 1),
    Home: () => view.all(), End: () => view.show(view.end - view.width, view.end),
    ".": () => timeline.step(1), ",": () => timeline.step(-1),
    n: () => stepBySize(timeline, 1), p: () => stepBySize(timeline, -1), t: () => showInTables(timeline),
    Escape: () => hover.hide(),
  };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = actions[event.key] || actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const buttons = { in: actions["+"], out: actions["-"], all: actions.Home, next: actions.n, previous: actions.p, table: actions.t };
  for (const button of timeline.root.querySelectorAll("[data-do]")) {
    button.addEventListener("click", buttons[button.dataset.do]);
  }
}

// Another row: its span nearest to the one that was chosen, or to the middle of the view.
function moveRow(timeline, by) {
  const { hover, view } = timeline;
  const next = Math.min(Math.max(timeline.row + by, 0), timeline.rows.length - 1);
  const around = hover.chosen && !hover.tip.hidden ? hover.chosen.track.start[hover.chosen.at] - 1 : view.from - 1;
  timeline.row = next;
  timeline.choose(timeline.rows[next], around, 1);
}
