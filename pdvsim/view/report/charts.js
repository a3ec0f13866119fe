"use strict";
// The charts, each a function of the document and the selection. Texts from files are escaped, because plotly
// interprets some markup in labels.

const escapeText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
const STEP_NAMES = { queue: "queue", prefill: "prefill", draft: "draft", wait: "wait for verify", verify: "verify or decode", other: "hand-overs, host" };

function theme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["card", "ink", "faint", "line", "grid"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
}

function layout(more) {
  const t = theme();
  const axis = { gridcolor: t.grid, linecolor: t.line, zerolinecolor: t.line, automargin: true };
  const base = {
    paper_bgcolor: t.card, plot_bgcolor: t.card, font: { color: t.ink, size: 13 }, margin: { l: 60, r: 16, t: 10, b: 48 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, hoverlabel: { namelength: -1 },
  };
  const made = { ...base, ...more };
  for (const name of Object.keys(made)) if (/^[xy]axis\d*$/.test(name)) made[name] = { ...axis, ...made[name], title: { font: { size: 13 }, ...made[name].title } };
  return made;
}

const narrow = () => window.innerWidth < 600;

// Ticks at 1, 2 and 5 of each decade, or fewer if they would collide.
function logTicks(low, high) {
  if (!(low > 0) || !(high > 0)) return {};
  const most = narrow() ? 4 : 7;
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
      for (const step of steps) if (step * 10 ** e >= 0.97 * low && step * 10 ** e <= 1.03 * high) ticks.push(Number((step * 10 ** e).toPrecision(3)));
    }
    if (ticks.length <= most && ticks.length > 1) return { tickvals: ticks, ticktext: ticks.map((v) => v.toLocaleString("en", { maximumFractionDigits: 6 })) };
  }
  const ends = [low, Math.sqrt(low * high), high].map((v) => Number(v.toPrecision(2)));
  return high > 30 * low ? {} : { tickvals: ends, ticktext: ends.map((v) => v.toLocaleString("en", { maximumFractionDigits: 6 })) };
}

function draw(id, traces, shape, otherwise) {
  const place = document.getElementById(id);
  place.closest("section").hidden = !traces.length && !otherwise;
  if (place.classList.contains("empty")) place.replaceChildren();  // its placeholder text
  place.classList.toggle("empty", !traces.length);
  if (!traces.length) {
    if (window.Plotly && place.classList.contains("js-plotly-plot")) Plotly.purge(place);
    place.textContent = otherwise || "";
    return;
  }
  Plotly.react(place, traces, layout(shape), CONFIG);
}

const colourOf = (doc, arch) => doc.archs.find((a) => a.name === arch).colour;
const fade = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const sameLoad = (a, b) => a[0] === b[0] && a[1] === b[1];

// A metric of each architecture over the loads, with its interval; hollow if the queue kept growing.
function overLoads(id, doc, chosen, metric) {
  const loads = doc.loads.filter((l) => l.kind === chosen.load[0]);
  const named = doc.metrics[metric];
  const traces = [];
  for (const arch of chosen.archs) {
    const mine = loads.map((l) => doc.entries.find((e) => e.setting === chosen.setting && e.arch === arch && sameLoad(e.load, [l.kind, l.text])));
    const at = loads.map((l, i) => [l, mine[i]]).filter(([, e]) => e && e.values[metric] && e.values[metric][0] !== null);
    if (!at.length) continue;
    const colour = colourOf(doc, arch);
    const value = at.map(([, e]) => e.values[metric]);
    const bands = at.map(([, e]) => e.bands[metric]);
    if (loads.length > 1 && bands.every(Boolean)) {
      traces.push({
        type: "scatter", mode: "lines", x: [...at.map(([l]) => l.x), ...at.map(([l]) => l.x).reverse()], y: [...bands.map((b) => b[1]), ...bands.map((b) => b[0]).reverse()],
        fill: "toself", fillcolor: fade(colour, 0.14), line: { width: 0 }, hoverinfo: "skip", showlegend: false, name: escapeText(`${arch}, error bar`),
      });
    }
    const common = {
      name: escapeText(arch), y: value.map((v) => v[0]), error_y: { symmetric: false, array: value.map((v) => v[1] || 0), arrayminus: value.map((v) => Math.min(v[0], v[1] || 0)), color: colour, thickness: 1.3, width: 3 },
      text: at.map(([, e]) => escapeText(`${e.stability}, ${e.n} replication${e.n > 1 ? "s" : ""}`)),
      hovertemplate: `<b>${escapeText(arch)}</b> at %{customdata}: %{y:,.4~r} ${named.unit}<br>%{text}<extra></extra>`, customdata: at.map(([l]) => l.text),
    };
    traces.push(loads.length === 1
      ? { ...common, type: "bar", textposition: "none", error_y: { ...common.error_y, color: theme().ink }, x: at.map(() => escapeText(arch)), marker: { color: colour, pattern: { shape: at.map(([, e]) => (e.grew ? "/" : "")) } }, showlegend: false }
      : { ...common, type: "scatter", mode: "lines+markers", x: at.map(([l]) => l.x), line: { color: colour, width: 2 },
          marker: { size: 9, color: colour, line: { width: 2, color: colour }, symbol: at.map(([, e]) => (e.grew ? "circle-open" : "circle")) } });
  }
  const latency = /_(ttft|tpot|itl|e2el)_ms$/.exec(metric);
  const means = traces.flatMap((t) => t.y).filter((v) => v > 0);
  // a service level far from all curves would flatten them, so it is only labelled
  const levels = ((latency && doc.levels[latency[1]]) || []).filter(() => means.length).map((ms) => [ms, ms <= 3 * Math.max(...means)]);
  means.push(...levels.filter(([, near]) => near).map(([ms]) => ms));
  const wide = /ttft|e2el/.test(metric) && Math.max(...means) > 10 * Math.min(...means);
  const xaxis = loads.length === 1 ? { title: { text: "" } } : {
    type: "log", tickvals: loads.map((l) => l.x), ticktext: loads.map((l) => l.text),
    title: { text: chosen.load[0] === "concurrency" ? "Concurrent requests" : "Request rate (req/s)" },
  };
  const yaxis = { title: { text: `${named.title} (${named.unit})` }, type: wide ? "log" : "linear", ...(wide ? logTicks(Math.min(...means), Math.max(...means)) : { rangemode: "tozero" }) };
  const ink = theme().faint;
  const shapes = levels.filter(([, near]) => near).map(([ms]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: ms, y1: ms, line: { color: ink, width: 1.5, dash: "dash" } }));
  const annotations = levels.map(([ms, near]) => ({
    xref: "paper", x: 1, xanchor: "right", text: `service level ${ms} ms${near ? "" : " ↑"}`, showarrow: false, font: { size: 11, color: ink },
    ...(near ? { y: wide ? Math.log10(ms) : ms, yanchor: "bottom" } : { yref: "paper", y: 1, yanchor: "top" }),
  }));
  draw(id, traces, { xaxis, yaxis, shapes, annotations }, "No data for this selection.");
}

function histogram(id, doc, chosen) {
  const counted = doc.histograms.find((h) => h.setting === chosen.setting && h.metric === chosen.latency && sameLoad(h.load, chosen.load));
  const traces = [];
  for (const arch of counted ? chosen.archs.filter((a) => counted.counts[a]) : []) {
    const counts = counted.counts[arch];
    const total = counts.reduce((a, b) => a + b, 0);
    const colour = colourOf(doc, arch);
    traces.push({
      type: "scatter", mode: "lines", name: escapeText(arch), x: counted.edges, y: [...counts, 0].map((c) => (100 * c) / total), line: { color: colour, width: 1.8, shape: "hv" },
      fill: "tozeroy", fillcolor: fade(colour, 0.15), customdata: [...counts, 0],
      hovertemplate: `<b>${escapeText(arch)}</b> from %{x:,.4~r} ms: %{customdata} of ${total}<extra></extra>`,
    });
  }
  draw(id, traces, {
    xaxis: { type: "log", title: { text: `${chosen.latency.toUpperCase()} (ms)` }, ...(counted ? logTicks(counted.edges[0], counted.edges[counted.edges.length - 1]) : {}) },
    yaxis: { title: { text: chosen.latency === "itl" ? "% of chunks" : "% of requests" }, rangemode: "tozero" },
  });
  return counted;
}

// The target's forwards verify drafts, or decode without drafts.
const stepName = (step, entries) => (step !== "verify" || entries.every((e) => e.drafts) ? (step === "verify" ? "verify" : STEP_NAMES[step]) : entries.some((e) => e.drafts) ? STEP_NAMES.verify : "decode");

function breakdown(id, doc, entries) {
  const traces = Object.keys(doc.colours.step).filter((step) => entries.some((e) => e.steps[step] !== undefined)).map((step) => ({
    type: "bar", orientation: "h", name: stepName(step, entries), y: entries.map((e) => escapeText(e.arch)), x: entries.map((e) => e.steps[step]),
    marker: { color: doc.colours.step[step], pattern: { shape: entries.map((e) => (e.grew ? "/" : "")) } },
    customdata: entries.map((e) => (step !== "verify" ? STEP_NAMES[step] : e.drafts ? "verify" : "decode")),
    hovertemplate: "%{customdata}: %{x:,.4~r} ms<extra>%{y}</extra>",
  }));
  draw(id, entries.length ? traces : [], {
    barmode: "stack", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, xaxis: { title: { text: "Mean time of a request (ms)" } }, yaxis: { autorange: "reversed", automargin: true }, margin: { l: 90, r: 16, t: 10, b: 48 },
  }, "No data: choose an architecture with this load.");
}

// Panels with a common time axis: zooming applies to all.
function timeline(id, doc, series) {
  const traces = [];
  const panels = [
    ["In the system", [["requests", series && series.in_flight, doc.colours.other[1]]], 1],
    ["Queues", [["not admitted", series && series.waiting, doc.colours.other[0]], ...lanesOf(doc, series, "queue")], 1],
    ["Batch (rows)", Object.entries((series && series.batch) || {}).map(([n, v]) => [n, v, doc.colours.kind[n]]), 1],
    ["Draft length", [["draft", (series && series.draft_length.length && series.draft_length) || null, doc.colours.kind.draft]], 1],
    ["Busy (%)", lanesOf(doc, series, "busy"), 100],
    ["Copy bandwidth (%)", lanesOf(doc, series, "bandwidth"), 100],
  ].map(([title, lines, scale]) => [title, lines.filter(([, v]) => v), scale]).filter(([, lines]) => lines.length);
  const slim = narrow();
  const shape = { margin: slim ? { l: 48, r: 8, t: 10, b: 48 } : { l: 70, r: 150, t: 10, b: 48 }, hovermode: "x unified", showlegend: true };
  const room = 1 / Math.max(panels.length, 1);
  panels.forEach(([title, lines, scale], i) => {
    const suffix = i ? String(i + 1) : "";
    const top = 1 - i * room;
    shape[`yaxis${suffix}`] = { title: { text: title }, domain: [Math.max(top - room + 0.035, 0), top], rangemode: "tozero", ...(scale === 100 ? { range: [0, 105] } : {}) };
    shape[`legend${suffix}`] = slim
      ? { x: 0.02, xanchor: "left", y: top, yanchor: "top", orientation: "h", font: { size: 10 }, bgcolor: fade("#ffffff", 0) }
      : { x: 1.01, xanchor: "left", y: top, yanchor: "top" };
    for (const [name, values, colour] of lines) {
      traces.push({
        type: "scatter", mode: "lines", name, x: values.map((_, j) => series.start_s + (j + 0.5) * series.bin_s), y: values.map((v) => (v === null ? null : v * scale)),
        line: { color: colour, width: 1.4 }, connectgaps: true, yaxis: `y${suffix}`, legend: `legend${suffix}`, hovertemplate: "%{y:,.3~r}",
      });
    }
  });
  shape.xaxis = { title: { text: "Time (s)" }, anchor: panels.length > 1 ? `y${panels.length}` : "y" };
  // the selection stays if a point has no records, with a message
  draw(id, series ? traces : [], shape, doc.entries.some((e) => e.series) ? "No records of this point were saved." : "");
}

const lanesOf = (doc, series, what) => Object.entries((series && series[what]) || {}).map(([lane, v]) => [lane, v, doc.colours.lane[lane]]);
