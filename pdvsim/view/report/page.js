"use strict";
// The page of a report and of a live session. Python describes what is shown (`pdvsim.view.charts`): parts, each with
// charts, a table or a note. A report holds every part for every choice; a live session sends them while it runs.

const doc = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const number = (v, digits = 4) => Number(v.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
const swatch = (colour, name) => `<span class="swatch" style="background:${colour}"></span> ${escaped(name)}`;

// charts ------------------------------------------------------------------------------------------------------------

const DASH = { "--": "7 4", ":": "2 3", "-.": "7 3 2 3" };
const ROW = 26;  // height of a row of bars

// An axis over pixels: `at` gives the pixel of a value, `of` the value of a pixel.
function scale(low, high, from, to, log) {
  const [f, back] = log ? [Math.log10, (v) => 10 ** v] : [(v) => v, (v) => v];
  const [a, b] = [f(low), f(high) === f(low) ? f(low) + 1 : f(high)];
  return { low, high, log, at: (v) => from + ((f(v) - a) / (b - a)) * (to - from), of: (px) => back(a + ((px - from) / (to - from)) * (b - a)) };
}

function ticks(s, most) {
  if (s.log) {  // 1, 2 and 5 of each decade, or fewer if they would collide
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      const at = [];
      for (let e = Math.floor(Math.log10(s.low)); e <= Math.log10(s.high); e += 1) at.push(...steps.map((v) => v * 10 ** e));
      const inside = at.filter((v) => v >= 0.99 * s.low && v <= 1.01 * s.high);
      if (inside.length > 1 && inside.length <= most) return inside.map((v) => [v, number(v, 3)]);
    }
    return [s.low, Math.sqrt(s.low * s.high), s.high].map((v) => [v, number(v, 2)]);
  }
  const rough = (s.high - s.low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((v) => v * power >= rough * 0.999) * power, at = [];
  for (let v = Math.ceil(s.low / step - 1e-9); v * step <= s.high * (1 + 1e-9); v += 1) at.push([v * step, number(v * step, 12)]);
  return at;
}

function extent(values, log) {
  const known = values.filter((v) => v !== null && (!log || v > 0));
  return known.length ? [Math.min(...known), Math.max(...known)] : [log ? 1 : 0, 1];
}

// Ends of the vertical axis: means and error bars, intervals up to a limit (those of two runs can be very long).
function heights(chart, traces) {
  const [low, high] = extent(traces.flatMap((t) => [...t.y, ...(t.low || []), ...(t.high || [])]), chart.log_y);
  if (chart.log_y) return [low / 1.5, high * 1.5];
  const reach = Math.max(high, ...traces.flatMap((t) => (t.half || []).map((h, i) => t.y[i] + h)));
  const level = (chart.levels || []).filter((v) => !chart.upright && v < 3 * high);
  return [0, chart.top || 1.08 * Math.max(Math.min(reach, 1.5 * high), ...level) || 1];
}

function legend(entries) {
  return entries.length > 1 ? `<div class="legend">${entries.map(([name, colour]) => `<span>${swatch(colour, name)}</span>`).join("")}</div>` : "";
}

function draw(place, chart, hidden, zoom) {
  const traces = (chart.traces || []).filter((t) => !hidden.has(t.name));
  const rows = (chart.rows || []).map((name, i) => [name, i]).filter(([name]) => !hidden.has(name));
  const width = place.clientWidth, height = chart.rows ? ROW * rows.length + 46 : chart.height || 250;
  const body = [], bottom = height - 36;
  const text = (x, y, words, more = "") => body.push(`<text x="${x}" y="${y}" ${more}>${escaped(words)}</text>`);
  const line = (x1, y1, x2, y2, name) => body.push(`<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${name}"/>`);
  let xs, ys, names = [];
  if (chart.rows) {
    const [, most] = extent(chart.bars.map((b) => b[2]));
    const left = 14 + 7 * Math.max(4, ...rows.map(([name]) => name.length));
    xs = scale(...(chart.range || [0, 1.04 * most || 1]), Math.min(left, width / 2), width - 12);
    names = rows.map(([name], at) => [name, 12 + ROW * at + ROW / 2]);
  } else {
    const wide = heights(chart, traces);
    const [x0, x1] = zoom || chart.range || extent(traces.flatMap((t) => t.x), chart.log_x);
    ys = scale(...wide, bottom, 10, chart.log_y);
    names = ticks(ys, Math.max(2, Math.floor(height / 45))).map(([v, words]) => [words, ys.at(v)]);
    const left = 14 + 7 * Math.max(2, ...names.map(([words]) => words.length));
    const margin = chart.ticks && !zoom ? (chart.log_x ? (x1 / x0) ** 0.03 : 0.03 * (x1 - x0)) : 0;
    xs = chart.log_x ? scale(x0 / (margin || 1), x1 * (margin || 1), left, width - 14, true) : scale(x0 - margin, x1 + margin, left, width - 14);
  }
  const across = chart.ticks ? chart.ticks.filter(([v]) => v >= xs.low && v <= xs.high) : ticks(xs, Math.max(2, Math.floor(width / (chart.log_x ? 75 : 90))));
  const [start, end] = [xs.at(xs.low), xs.at(xs.high)];
  for (const [words, y] of names) {
    if (!chart.rows) line(start, y, end, y, "grid");
    text(start - 7, y + 4, words, 'text-anchor="end"');
  }
  let last = -Infinity;  // labels that would run into the one before are left out
  for (const [v, words] of across) {
    line(xs.at(v), 10, xs.at(v), bottom, "grid");
    if (xs.at(v) - last > 7 * words.length + 4) { text(xs.at(v), bottom + 16, words, 'text-anchor="middle"'); last = xs.at(v); }
  }
  text((start + end) / 2, height - 4, chart.x || "", 'text-anchor="middle" class="faint"');
  body.push(`<svg x="${start}" y="0" width="${Math.max(end - start, 1)}" height="${bottom + 6}" viewBox="${start} 0 ${Math.max(end - start, 1)} ${bottom + 6}">`);
  if (chart.rows) bars(body, chart, rows, xs);
  else for (const t of traces) curve(body, t, xs, ys);
  for (const level of chart.levels || []) {
    const inside = chart.upright ? level <= xs.high && level >= xs.low : level <= ys.high && level >= ys.low;
    if (inside && chart.upright) line(xs.at(level), 10, xs.at(level), bottom, "level");
    else if (inside) line(start, ys.at(level), end, ys.at(level), "level");
    text(end - 4, inside && !chart.upright ? ys.at(level) - 4 : 20, `service level ${number(level)} ms${inside ? "" : chart.upright ? " →" : " ↑"}`, 'text-anchor="end" class="faint"');
  }
  body.push(`</svg><line class="cross" x1="-9" x2="-9" y1="10" y2="${bottom}"/><rect class="zoom" y="10" height="${bottom - 10}" width="0"/>`);
  const key = chart.key || (chart.rows ? [] : traces.map((t) => [t.name, t.colour]));
  place.innerHTML = `${chart.title ? `<h3>${escaped(chart.title)}${chart.unit ? ` (${escaped(chart.unit)})` : ""}</h3>` : ""}${legend(key)}<svg class="plot" width="${width}" height="${height}">${body.join("")}</svg>`;
  place.shown = { traces, xs, unit: chart.unit || "", ticks: chart.ticks, x: chart.x || "" };
}

function curve(body, t, xs, ys) {
  const floor = ys.at(ys.low), at = t.x.map((x, i) => [xs.at(x), t.y[i]]).filter(([x, y]) => y !== null && Number.isFinite(x));
  const path = (points) => points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const joined = at.flatMap(([x, y], i) => (t.step && i ? [[x, ys.at(at[i - 1][1])], [x, ys.at(y)]] : [[x, ys.at(y)]]));
  if (!joined.length) return;
  if (t.low) body.push(`<polygon class="band" fill="${t.colour}" points="${path([...t.x.map((x, i) => [xs.at(x), ys.at(t.high[i])]), ...t.x.map((x, i) => [xs.at(x), ys.at(t.low[i])]).reverse()])}"/>`);
  if (t.fill) body.push(`<polygon class="band" fill="${t.colour}" points="${path([[joined[0][0], floor], ...joined, [joined[joined.length - 1][0], floor]])}"/>`);
  body.push(`<polyline fill="none" stroke="${t.colour}" stroke-width="1.8" stroke-dasharray="${DASH[t.dash] || ""}" points="${path(joined)}"/>`);
  (t.half || []).forEach((half, i) => {
    const [low, high] = [t.y[i] - half, t.y[i] + half].map((v) => ys.at(Math.max(v, ys.log ? ys.low : 0)));
    if (half) body.push(`<path stroke="${t.colour}" stroke-width="1.3" fill="none" d="M${xs.at(t.x[i]) - 3},${low}h6m-3,0V${high}m-3,0h6"/>`);
  });
  (t.hollow || []).forEach((hollow, i) => body.push(`<circle cx="${xs.at(t.x[i])}" cy="${ys.at(t.y[i])}" r="4" stroke="${t.colour}" stroke-width="1.8" class="${hollow ? "hollow" : ""}" fill="${t.colour}"/>`));
}

// Bars are a row, both ends, colour, what to say about them, whether they are hollow, and an interval or 0.
function bars(body, chart, rows, xs) {
  const place = new Map(rows.map(([, row], at) => [row, 12 + ROW * at]));
  for (const [row, from, to, colour, words, hollow, half] of chart.bars) {
    if (!place.has(row)) continue;
    const x = xs.at(Math.max(from, xs.low)), y = place.get(row), wide = Math.max(xs.at(Math.min(to, xs.high)) - x, 0.5);
    body.push(`<rect x="${x.toFixed(1)}" y="${y + 3}" width="${wide.toFixed(1)}" height="${ROW - 6}" fill="${colour}" ${hollow ? `fill-opacity="0.25" stroke="${colour}"` : ""} data-text="${escaped(words)}"/>`);
    if (half) body.push(`<path class="whisker" d="M${xs.at(to - half)},${y + 8}v10m0,-5H${xs.at(to + half)}m0,-5v10"/>`);
  }
}

// The values at the pointer, of all curves that have one there.
function hover(place, event) {
  const { traces, xs, unit, ticks, x: axis } = place.shown, box = place.querySelector("svg").getBoundingClientRect();
  const px = event.clientX - box.left, cross = place.querySelector(".cross");
  const near = traces.map((t) => t.x.reduce((best, x, i) => (t.y[i] !== null && Math.abs(xs.at(x) - px) < Math.abs(xs.at(t.x[best]) - px) ? i : best), 0));
  const best = near.map((i, n) => xs.at(traces[n].x[i])).reduce((a, b) => (Math.abs(b - px) < Math.abs(a - px) ? b : a), Infinity);
  const words = event.target.dataset.text ? [escaped(event.target.dataset.text)] : traces.flatMap((t, n) => (Math.abs(xs.at(t.x[near[n]]) - best) > 1 || (t.y[near[n]] ?? null) === null ? [] : [
    `${swatch(t.colour, t.name)}: ${number(t.y[near[n]])} ${escaped(unit)}${t.half && t.half[near[n]] ? ` ± ${number(t.half[near[n]], 2)}` : ""} ${escaped((t.text || [])[near[n]] || "")}`]));
  if (words.length && traces.length) {
    const at = xs.of(best), named = (ticks || []).find(([v]) => Math.abs(v - at) < 1e-6 * Math.abs(at) + 1e-9);
    words.unshift(escaped(`${named ? named[1] : number(at)} ${axis.replace(/^.*\((.*)\)$/, "$1")}`));
    cross.setAttribute("x1", best); cross.setAttribute("x2", best);
  }
  const tip = $("tip");
  tip.hidden = !words.length;
  tip.innerHTML = words.join("<br>");
  tip.style.left = `${Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, document.documentElement.clientHeight - tip.offsetHeight - 8)}px`;
}

// tables --------------------------------------------------------------------------------------------------------------

const unfolded = new Set();

function table(what, hidden) {
  const shown = what.heads.map((_, i) => i).filter((i) => !hidden.has(what.heads[i][0]));
  let group = "";
  const rows = what.rows.map(([name, of, cells]) => {
    const head = of && of !== group ? `<tr class="group${unfolded.has(of) ? " open" : ""}" data-group="${escaped(of)}"><td colspan="${shown.length + 1}">${escaped(of)}</td></tr>` : "";
    group = of;
    const line = shown.map((i) => `<td class="${cells[i][2] || ""}">${escaped(cells[i][0])}${cells[i][1] ? ` <small>${escaped(cells[i][1])}</small>` : ""}</td>`).join("");
    return of && !unfolded.has(of) ? head : `${head}<tr><td>${escaped(name)}</td>${line}</tr>`;
  });
  const heads = shown.map((i) => `<th style="border-bottom:3px solid ${what.heads[i][1]}">${escaped(what.heads[i][0])}</th>`);
  return `<div class="scroll"><table><thead><tr><th></th>${heads.join("")}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}

// parts ---------------------------------------------------------------------------------------------------------------

const hiddenNow = () => new Set([...document.querySelectorAll("input[name=arch]:not(:checked)")].map((box) => box.value));

const main = document.querySelector("main"), still = main.firstElementChild;
for (const part of doc.parts) {
  part.section = document.createElement("section");
  part.section.className = part.kind || "";
  part.section.id = part.id;
  part.section.innerHTML = `<h2>${escaped(part.title)}</h2><div class="body"></div><p class="note"></p>`;
  part.section.hidden = true;
  main.insertBefore(part.section, still);
}
const seen = new IntersectionObserver((changes) => changes.forEach(({ target, isIntersecting }) => {
  const part = doc.parts.find((one) => one.section === target);
  part.visible = isIntersecting;
  if (isIntersecting && part.stale) paint(part);
}), { rootMargin: "100px" });
doc.parts.forEach((part) => seen.observe(part.section));

// Show something in a part: now if it is on the screen, else when it comes there.
function put(part, what) {
  part.what = what;
  part.section.hidden = !what;
  part.stale = true;
  if (what && part.visible) paint(part);
}

function paint(part) {
  const body = part.section.querySelector(".body"), { what } = part, charts = what.charts || [];
  part.stale = false;
  part.section.querySelector(".note").textContent = what.note || "";
  if (what.table) body.innerHTML = table(what.table, hiddenNow());
  else {
    while (body.children.length > charts.length) body.lastChild.remove();
    while (body.children.length < charts.length) body.append(document.createElement("div"));
    charts.forEach((chart, i) => draw(body.children[i], chart, hiddenNow(), part.zoom));
  }
}

const repaint = () => doc.parts.forEach((part) => part.what && put(part, part.what));
const partOf = (event) => doc.parts.find((part) => part.section === event.target.closest("section"));
let drag = null;
document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest("svg.plot");
  if (svg) hover(svg.parentElement, event);
  else $("tip").hidden = true;
  if (!drag) return;
  const [from, to] = [drag.x, event.clientX].map((x) => x - drag.left).sort((a, b) => a - b);
  drag.rect.setAttribute("x", from); drag.rect.setAttribute("width", to - from);
});
document.addEventListener("pointerdown", (event) => {
  const svg = event.target.closest("svg.plot"), group = event.target.closest(".group");
  if (svg && svg.parentElement.shown.traces.length && !doc.feed) drag = { x: event.clientX, left: svg.getBoundingClientRect().left, place: svg.parentElement, rect: svg.querySelector(".zoom"), part: partOf(event) };
  if (!group) return;  // no click: a row may be replaced before the button is released
  if (!unfolded.delete(group.dataset.group)) unfolded.add(group.dataset.group);
  repaint();
});
document.addEventListener("pointerup", (event) => {
  if (drag && Math.abs(event.clientX - drag.x) > 8) {  // all charts of a part have one axis
    drag.part.zoom = [drag.x, event.clientX].map((x) => drag.place.shown.xs.of(x - drag.left)).sort((a, b) => a - b);
    paint(drag.part);
  }
  drag = null;
});
document.addEventListener("dblclick", (event) => { const part = partOf(event); if (part && part.zoom) { part.zoom = null; paint(part); } });
window.addEventListener("resize", repaint);

// controls ------------------------------------------------------------------------------------------------------------

const valueOf = (id) => $(id).value;

function control(c) {
  const label = document.createElement(c.kind === "button" || c.kind === "group" ? "div" : "label");
  if (c.kind === "button") label.innerHTML = `<button type="button" id="${c.id}">${escaped(c.label)}</button>`;
  else if (c.kind === "group") label.innerHTML = `<div id="${c.id}" class="buttons" role="group" aria-label="${escaped(c.label)}">${c.options.map((o) => `<button type="button">${escaped(o)}</button>`).join("")}</div>`;
  else if (c.kind === "range") label.innerHTML = `<span>${escaped(c.label)}: <output></output></span><input type="range" id="${c.id}" min="${c.min}" max="${c.max}" step="${c.step}">`;
  else label.innerHTML = `<span>${escaped(c.label)}</span><select id="${c.id}"></select>`;
  label.hidden = c.hidden === true;
  $("controls").append(label);
  set(c.id, c);
}

// Set what is given of a control. Options are texts, or values with their texts; those that depend on another control
// are by its value.
function set(id, { value, options, by, label, disabled, active }) {
  const place = $(id), own = by ? options[valueOf(by)] : options, before = place.value;
  if (own && place.tagName === "SELECT") {
    place.replaceChildren(...own.map((o) => (Array.isArray(o) ? new Option(o[1], o[0]) : new Option(o))));
    const wanted = by ? [before, value && value[valueOf(by)]] : [before];
    for (const one of wanted.reverse()) if ([...place.options].some((o) => o.value === one)) place.value = one;
  }
  if (value !== undefined && !by) {
    if (place.tagName === "SELECT" && ![...place.options].some((o) => o.value === String(value))) place.append(new Option(value));
    place.value = value;
    const out = place.parentElement.querySelector("output");
    if (out) out.value = value;
  }
  if (label !== undefined && place.tagName === "BUTTON") place.textContent = label;
  if (disabled !== undefined) place.disabled = disabled;
  if (active !== undefined) [...place.children].forEach((one, i) => one.setAttribute("aria-pressed", i === active));
}

function choose() {
  for (const part of doc.parts) put(part, part.content[(part.by || []).map(valueOf).join("|")] || null);
}

for (const { name, colour } of doc.archs) $("archs").insertAdjacentHTML("beforeend", `<label><input type="checkbox" name="arch" value="${escaped(name)}" checked>${swatch(colour, name)}</label>`);
doc.controls.forEach(control);
document.addEventListener("input", ({ target }) => { if (target.type === "range") target.parentElement.querySelector("output").value = target.value; });
document.addEventListener("change", ({ target }) => {
  if (target.name === "arch") return repaint();
  if (doc.feed) return send(target.id, target.type === "range" ? Number(target.value) : target.value);
  doc.controls.filter((c) => c.by === target.id).forEach((c) => set(c.id, c));
  doc.parts.forEach((part) => { part.zoom = null; });
  choose();
});
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button && button.id) send(button.id);
  else if (button) send(button.parentElement.id, [...button.parentElement.children].indexOf(button));
});

let socket;
const send = (what, value = null) => { if (socket && socket.readyState === 1) socket.send(JSON.stringify([what, value])); };
if (doc.feed) {
  document.body.className = "live";
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws`);
  socket.onmessage = (event) => {
    const news = JSON.parse(event.data);
    for (const [id, html] of Object.entries(news.html)) $(id).innerHTML = html;  // whose parts are escaped
    for (const [id, settings] of Object.entries(news.controls)) set(id, settings);
    for (const part of doc.parts) if (part.id in news.parts) put(part, news.parts[part.id]);
    requestAnimationFrame(() => setTimeout(() => send("drawn", news.number)));
  };
  socket.onclose = () => { $("status").innerHTML = "<b>the session has ended</b>, or cannot be reached: reload the page"; };
} else choose();

// commands -------------------------------------------------------------------------------------------------------------

for (const place of document.querySelectorAll("pre.command")) {
  const code = place.querySelector("code");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {  // pages over plain HTTP have no clipboard
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  place.append(button);
}
