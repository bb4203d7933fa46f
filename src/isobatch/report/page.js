"use strict";
(() => {
  const table = document.getElementById("jobs"), body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead button")];
  const jobs = [...body.rows].map((row) => row.dataset.n);
  document.body.classList.toggle("many", jobs.length > 16);

  // Sorting: numbers as numbers, names with numbers in natural order, what is unknown last in both directions.
  const natural = new Intl.Collator("en", { numeric: true });
  const raw = (row, c) => row.cells[c].dataset.v;
  const unknown = (v) => v === undefined || v === "nan";
  const numeric = (v) => v.trim() !== "" && !Number.isNaN(asNumber(v));
  const asNumber = (v) => (v === "inf" ? Infinity : v === "-inf" ? -Infinity : Number(v));
  function sort(column, direction) {
    const order = (a, b) => {
      const x = raw(a, column), y = raw(b, column);
      if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);
      const both = numeric(x) && numeric(y);
      if (!both && numeric(x) !== numeric(y)) return (numeric(y) - numeric(x)) * direction;
      return (both ? asNumber(x) - asNumber(y) || 0 : natural.compare(x, y)) * direction;
    };
    body.append(...[...body.rows].sort(order));
    heads.forEach((head, c) => {
      if (c === column) head.parentNode.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.parentNode.removeAttribute("aria-sort");
    });
  }
  heads.forEach((head, c) => head.addEventListener("click", () => {
    const direction = head.parentNode.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    sort(c, direction);
    try { history.replaceState(null, "", `#sort=${direction < 0 ? "-" : ""}${encodeURIComponent(head.textContent)}`); } catch { }
  }));
  const asked = /^#sort=(-?)(.+)$/.exec(location.hash);
  if (asked) {
    let name = asked[2];
    try { name = decodeURIComponent(name); } catch { }
    const column = heads.findIndex((head) => head.textContent === name);
    if (column >= 0) sort(column, asked[1] ? -1 : 1);
  }
  document.getElementById("find").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });

  // One job lit everywhere: its row, its curves, its chip.
  const parts = new Map();
  for (const part of document.querySelectorAll("[data-j]")) {
    if (!parts.has(part.dataset.j)) parts.set(part.dataset.j, []);
    parts.get(part.dataset.j).push(part);
  }
  const figures = document.querySelector(".figures");
  let lit = null;
  function light(job) {
    if (job === lit) return;
    for (const part of parts.get(lit) || []) part.classList.remove("lit");
    for (const part of parts.get(job) || []) part.classList.add("lit");
    lit = job;
    if (figures) figures.classList.toggle("picked", job !== null);
  }
  for (const part of document.querySelectorAll("tr[data-j], .chip, .job")) {
    part.addEventListener("pointerenter", () => light(part.dataset.j));
    part.addEventListener("pointerleave", () => light(null));
  }
  for (const chip of document.querySelectorAll(".chip")) chip.addEventListener("click", () => {
    const on = chip.getAttribute("aria-pressed") !== "true";
    chip.setAttribute("aria-pressed", on);
    for (const part of parts.get(chip.dataset.j)) if (part.matches(".curve")) part.classList.toggle("off", !on);
  });

  // The value under the pointer, from the curve nearest to it.
  const short = (v) => (Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)));
  const points = new Map(); // path -> [[x, y], ...] in pixels of the view box
  function trace(path) {
    if (!points.has(path)) {
      const all = [];
      let x = 0, y = 0;
      for (const [, kind, dx, dy] of path.getAttribute("d").matchAll(/([Ml])(-?\d+)\s*(-?\d+)/g)) {
        x = kind === "M" ? +dx : x + +dx;
        y = kind === "M" ? +dy : y + +dy;
        all.push([x / 10, y / 10]);
      }
      points.set(path, all);
    }
    return points.get(path);
  }
  for (const chart of document.querySelectorAll(".chart")) {
    const [left, top, wide, high] = chart.dataset.frame.split(",").map(Number);
    const [low, up, log] = chart.dataset.y.split(",").map(Number);
    const cross = chart.querySelector(".cross"), spot = chart.querySelector(".spot"), tip = chart.parentNode.querySelector(".tip");
    const curves = [...chart.querySelectorAll(".curve")];
    let waiting = false;
    chart.addEventListener("pointermove", (event) => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        const box = chart.getBoundingClientRect(), zoom = 640 / box.width;
        const px = (event.clientX - box.left) * zoom, py = (event.clientY - box.top) * zoom;
        let best = null, distance = Infinity;
        for (const curve of curves) if (!curve.classList.contains("off")) for (const [x, y] of trace(curve)) {
          const d = (x - px) ** 2 + (y - py) ** 2;
          if (d < distance) { distance = d; best = [curve.dataset.j, x, y]; }
        }
        if (!best || distance > 60 ** 2) return leave();
        const [job, x, y] = best, at = 1 - (y - top) / high;
        const value = log ? low * (up / low) ** at : low + (up - low) * at;
        light(job);
        cross.setAttribute("d", `M${x} ${top}V${top + high}`);
        spot.setAttribute("cx", x); spot.setAttribute("cy", y);
        tip.textContent = `${jobs[job]}   ${short(value)}   at ${short(chart.dataset.x * (x - left) / wide)}`;
      });
    });
    const leave = () => { light(null); tip.textContent = ""; cross.setAttribute("d", ""); spot.setAttribute("cx", -9); };
    chart.addEventListener("pointerleave", leave);
  }
})();
