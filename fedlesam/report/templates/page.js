"use strict";
(() => {
  const { groups, panels, pool, costs } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const on = groups.map(() => true);
  const DASH = { "-": "solid", "--": "dash", ":": "dot", "-.": "dashdot" };
  const SYMBOL = { "-": "circle", "--": "square", ":": "triangle-up", "-.": "diamond" };
  const SCENES = 12; // browsers keep about sixteen WebGL contexts alive
  const SHOWN = 0.8; // the share of all losses below the top of the scale
  const coarse = matchMedia("(pointer: coarse)").matches;
  const webgl = (() => { try { return !!document.createElement("canvas").getContext("webgl"); } catch { return false; } })();

  const dark = () => root.dataset.theme === "dark";
  const paint = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (g) => (dark() ? groups[g].dark : groups[g].light);
  const clear = (hex, a) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join()},${a})`;
  const safe = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads some HTML in its texts
  const values = (i) => (i === null ? null : pool[i]);

  // plotly's bar of buttons has one that sends the data to its makers' server, unless it is told not to
  const config = {
    showSendToCloud: false, plotlyServerURL: "",
    responsive: true, displaylogo: false, showTips: false, displayModeBar: coarse ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "resetCameraLastSave3d", "hoverClosest3d"],
  };
  const look = (extra) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: paint("--ink") },
    margin: { l: 56, r: 12, t: 28, b: 44 }, showlegend: false, uirevision: "kept",
    hoverlabel: { bgcolor: paint("--card"), bordercolor: paint("--line"), font: { color: paint("--ink") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: paint("--soft"), activecolor: paint("--accent") },
    dragmode: coarse ? false : "zoom", ...extra,
  });
  const axis = (title, extra) => ({
    title: { text: safe(title), standoff: 8 }, gridcolor: paint("--line"), linecolor: paint("--line"), zeroline: false,
    automargin: true, ...extra,
  });

  const drawn = { against: "", smooth: 1, span: 0 };
  function smoothed(list) {
    const half = (drawn.smooth - 1) / 2;
    return half < 1 ? list : list.map((own, i) => {
      const near = Math.min(half, i, list.length - 1 - i);
      const known = list.slice(i - near, i + near + 1).filter((v) => v !== null);
      return own === null ? null : known.reduce((a, b) => a + b, 0) / known.length;
    });
  }

  function curves(panel) {
    const chart = panel.options[panel.chosen];
    const rounds = chart.x === "round";
    const against = rounds ? drawn.against : "";
    const across = (s) => (against ? s.costs[against] : s.x);
    const shown = chart.series.filter((s) => on[s.group] && across(s) !== undefined);
    const last = Math.max(0, ...shown.map((s) => Math.max(...values(s.x))));
    const from = rounds ? drawn.span * last : -Infinity;
    const traces = [];
    for (const s of shown) {
      const late = (list) => list.filter((_, i) => values(s.x)[i] >= from);
      const line = (i) => (i === null ? null : late(rounds ? smoothed(values(i)) : values(i)));
      const x = late(values(across(s))), low = line(s.low), high = line(s.high);
      if (low !== null) {
        traces.push({
          x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself", type: "scatter",
          mode: "lines", line: { width: 0 }, fillcolor: clear(colour(s.group), dark() ? 0.22 : 0.16), hoverinfo: "skip",
          name: "", meta: { band: s.group },
        });
      } else if (rounds && drawn.smooth > 1) {
        traces.push({
          x, y: late(values(s.mean)), type: "scatter", mode: "lines", hoverinfo: "skip", name: "", meta: { raw: s.group },
          line: { color: clear(colour(s.group), 0.3), width: 1 },
        });
      }
      const range = low === null ? "" : "  (%{customdata[0]:.4g} to %{customdata[1]:.4g})";
      traces.push({
        x, y: line(s.mean), type: "scatter", mode: chart.points ? "lines+markers" : "lines",
        name: safe(groups[s.group].label), line: { color: colour(s.group), dash: DASH[groups[s.group].line], width: 2 },
        marker: { size: 6, symbol: SYMBOL[groups[s.group].line] }, meta: { group: s.group },
        customdata: low === null ? undefined : low.map((least, i) => [least, high[i]]),
        hovertemplate: `%{y:.4g}${range}<extra>${safe(groups[s.group].label)}</extra>`,
      });
    }
    const once = shown.length > 0 && shown.every((s) => values(s.x).length === 1);
    if (once) {  // a single look at each model: side by side, not on a line of rounds
      traces.splice(0, traces.length, ...shown.map((s) => {
        const [mean] = values(s.mean), low = s.low === null ? mean : values(s.low)[0], high = s.high === null ? mean : values(s.high)[0];
        return {
          x: against ? values(across(s)) : [safe(groups[s.group].label)], y: [mean], type: "scatter", name: safe(groups[s.group].label),
          mode: against ? "markers+text" : "markers", text: [safe(groups[s.group].label)], textposition: "top center", cliponaxis: false,
          marker: { size: 11, color: colour(s.group), symbol: SYMBOL[groups[s.group].line] }, meta: { group: s.group },
          error_y: { type: "data", symmetric: false, array: [high - mean], arrayminus: [mean - low], color: colour(s.group) },
          hovertemplate: `%{y:.4g}<extra>after round ${values(s.x)[0]}</extra>`,
        };
      }));
    }
    const y = axis(chart.y, { type: chart.log ? "log" : "linear", exponentformat: "power" });
    const label = against || (once ? "" : chart.x);
    const few = rounds && !against && last <= 10 ? { dtick: 1 } : {};
    Plotly.react(panel.plot, traces, look({
      xaxis: axis(label, {
        rangemode: rounds && !drawn.span ? "tozero" : "normal", type: once && !against ? "category" : "linear", separatethousands: true, ...few,
      }),
      yaxis: y, uirevision: `${panel.chosen} ${Object.values(drawn)}`,
      hovermode: shown.length <= 8 && !once ? "x unified" : "closest",
    }), { ...config, toImageButtonOptions: { format: "svg", filename: chart.key } });
    panel.plot.setAttribute("aria-label", `${chart.title}: a line chart of ${shown.map((s) => groups[s.group].label).join(", ")}`);
    const note = drawn.smooth > 1 && rounds && !once ? ` Smoothed: running mean of ${drawn.smooth} evaluations.` : "";
    panel.caption.textContent = (chart.caption + note).trim();
  }

  // A sweep: lines over one setting, a grid over two, a line across an axis per setting over more.
  const number = (v) => Number(v.toPrecision(4)).toString();
  const scored = (p) => `${number(p.mean)}${p.sd === null ? "" : ` ± ${number(p.sd)}`}`;
  const settings = (view, p) => view.axes.map((a, i) => `${safe(a.name)} ${safe(a.ticks[p.at[i]])}`).join(", ");
  function lines(view) {
    const [{ name, ticks, at, log }] = view.axes;
    const place = (p) => (at ? at[p.at[0]] : safe(ticks[p.at[0]]));
    const traces = [];
    for (const [method, points] of Object.entries(view.points)) {
      const shown = points.filter((p) => on[p.group]).sort((a, b) => a.at[0] - b.at[0]);
      if (!shown.length) continue;
      const g = points[0].group;
      traces.push({
        x: shown.map(place), y: shown.map((p) => p.mean), type: "scatter", mode: "lines+markers", name: safe(method), meta: { group: g },
        line: { color: colour(g), dash: DASH[groups[g].line], width: 2 }, marker: { size: 7, symbol: SYMBOL[groups[g].line] },
        error_y: { type: "data", array: shown.map((p) => p.sd ?? 0), visible: shown.some((p) => p.sd !== null), thickness: 1 },
        text: shown.map((p) => `${settings(view, p)}: ${scored(p)}`), hovertemplate: `%{text}<extra>${safe(method)}</extra>`,
      });
    }
    const ends = [at ? at[0] : safe(ticks[0]), at ? at[at.length - 1] : safe(ticks[ticks.length - 1])];
    for (const [method, p] of Object.entries(view.beside)) {
      if (!on[p.group]) continue;
      traces.push({
        x: ends, y: [p.mean, p.mean], type: "scatter", mode: "lines", name: safe(method), meta: { group: p.group },
        line: { color: colour(p.group), width: 1.5, dash: "dash" }, hovertemplate: `${scored(p)}<extra>${safe(method)}</extra>`,
      });
    }
    const marks = at ? { tickvals: at, ticktext: ticks.map(safe) } : { categoryarray: ticks.map(safe) };
    return [traces, { showlegend: true, legend: { orientation: "h", y: -0.2 }, xaxis: axis(name, { type: at ? (log ? "log" : "linear") : "category", ...marks }), yaxis: axis(view.y), hovermode: "closest" }];
  }
  function grid(view) {
    const [points] = Object.values(view.points), [across, up] = view.axes;
    const cell = (i, j) => points.find((p) => p.at[0] === i && p.at[1] === j && on[p.group]);
    const cells = up.ticks.map((_, j) => across.ticks.map((_, i) => cell(i, j)));
    return [[{
      type: "heatmap", x: across.ticks.map(safe), y: up.ticks.map(safe), z: cells.map((row) => row.map((p) => (p ? p.mean : null))),
      text: cells.map((row) => row.map((p) => (p ? scored(p) : ""))), texttemplate: "%{text}", colorscale: "Cividis", reversescale: view.smaller,
      xgap: 2, ygap: 2, colorbar: { title: { text: safe(view.y), side: "right" }, thickness: 12, outlinewidth: 0 },
      hovertemplate: `${safe(across.name)} %{x}, ${safe(up.name)} %{y}: %{text}<extra></extra>`,
    }], { xaxis: axis(across.name, { type: "category" }), yaxis: axis(up.name, { type: "category" }) }];
  }
  function parallel(view) {
    const [points] = Object.values(view.points), shown = points.filter((p) => on[p.group]);
    const scores = points.map((p) => p.mean), low = Math.min(...scores), high = Math.max(...scores);
    const height = (p) => (high > low ? (p.mean - low) / (high - low) : 0.5);
    const at = (i, tick) => (view.axes[i].ticks.length > 1 ? tick / (view.axes[i].ticks.length - 1) : 0.5);
    const good = (p) => (view.smaller ? 1 - height(p) : height(p));
    const strong = dark() ? "#8fd0ff" : "#08306b";
    const traces = [...shown].sort((a, b) => good(a) - good(b)).map((p) => ({
      x: [...view.axes.keys(), view.axes.length], y: [...view.axes.map((_, i) => at(i, p.at[i])), height(p)], type: "scatter",
      mode: "lines+markers", line: { color: clear(strong, 0.12 + 0.88 * good(p) ** 2), width: 1 + 2 * good(p) }, meta: { group: p.group },
      name: safe(groups[p.group].label), hovertemplate: `${settings(view, p)}: ${scored(p)}<extra></extra>`,
    }));
    const note = (x, y, text) => ({ x, y, text, showarrow: false, xanchor: "left", xshift: 6, bgcolor: clear(dark() ? "#171b21" : "#ffffff", 0.75), font: { size: 11 } });
    const annotations = view.axes.flatMap((a, i) => a.ticks.map((tick, j) => note(i, at(i, j), safe(tick))));
    for (const [y, value] of high > low ? [[0, low], [1, high]] : [[0.5, low]]) annotations.push(note(view.axes.length, y, number(value)));
    const names = [...view.axes.map((a) => safe(a.name)), safe(view.y)];
    return [traces, {
      annotations, hovermode: "closest", margin: { l: 20, r: 56, t: 28, b: 44 },
      xaxis: axis("", { tickvals: [...names.keys()], ticktext: names, zeroline: false }), yaxis: axis("", { showticklabels: false, showgrid: false, range: [-0.07, 1.07] }),
    }];
  }
  const FORMS = { lines, grid, parallel };
  function sweep(panel) {
    const view = panel.options[panel.chosen];
    const [traces, layout] = FORMS[view.form](view);
    Plotly.react(panel.plot, traces, look({ ...layout, uirevision: `${panel.chosen}` }), { ...config, toImageButtonOptions: { format: "svg", filename: "sweep" } });
    panel.plot.setAttribute("aria-label", `Sweep over ${view.axes.map((a) => a.name).join(", ")}`);
    panel.caption.textContent = view.caption;
  }

  function csv() {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const tame = (text) => quote(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
    const rows = [["curve", "method", "seeds", "round", ...costs, "mean", "low", "high"]];
    for (const chart of panels.filter((panel) => panel.kind === "curves").flatMap((panel) => panel.options)) {
      for (const s of chart.x === "round" ? chart.series : []) {
        const spent = costs.map((name) => (s.costs[name] === undefined ? [] : values(s.costs[name])));
        const low = values(s.low ?? s.mean), high = values(s.high ?? s.mean);
        values(s.x).forEach((x, i) => rows.push([chart.key, tame(groups[s.group].label), groups[s.group].seeds, x, ...spent.map((list) => list[i]), values(s.mean)[i], low[i], high[i]]));
      }
    }
    return rows.map((row) => row.join() + "\n").join("");
  }

  function heat(panel) {
    const split = panel.options[panel.chosen];
    const strong = dark() ? "#8fd0ff" : "#08306b";
    Plotly.react(panel.plot, [{
      z: split.counts, type: "heatmap", colorscale: [[0, paint("--low")], [0.5, dark() ? "#2b6ca3" : "#6baed6"], [1, strong]],
      xgap: split.counts[0].length <= 120 ? 1 : 0, ygap: split.counts.length <= 30 ? 1 : 0,
      colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0 },
      hovertemplate: "client %{x}, class %{y}: %{z} samples<extra></extra>",
    }], look({ xaxis: axis("client"), yaxis: axis("class", split.counts.length <= 20 ? { dtick: 1 } : {}) }), config);
    panel.caption.textContent = split.caption;
  }

  let camera = { eye: { x: 1.35, y: 1.35, z: 1.45 } };
  let turning = false;
  function turn(panel, from, to) {
    camera = to;
    if (turning) return;
    turning = true;
    requestAnimationFrame(async () => {
      const others = [...panel.scenes.querySelectorAll(".plot")].filter((plot) => plot !== from && plot.data);
      await Promise.all(others.map((plot) => Plotly.relayout(plot, { "scene.camera": camera })));
      turning = false;
    });
  }

  function surfaces(panel) {
    const shown = panel.options.filter((s) => on[s.group]);
    const solid = panel.view === "3-D" && webgl && shown.length <= SCENES;
    const log = panel.log.checked;
    const height = (v) => (v === null || (log && v <= 0) ? null : log ? Math.log10(v) : v);
    const all = panel.options.flatMap((s) => s.loss.flat()).map(height).filter((v) => v !== null).sort((a, b) => a - b);
    // as in the pictures: the walls beyond would flatten everything else
    const low = all[0] ?? 0, high = Math.max(all[Math.ceil(SHOWN * (all.length - 1))] ?? 1, low + 1e-6);
    panel.range.textContent = `${(log ? 10 ** low : low).toPrecision(3)} to ${(log ? 10 ** high : high).toPrecision(3)}, cut off there`;
    panel.caption.textContent = panel.view === "3-D" && !solid
      ? webgl ? `More than ${SCENES} surfaces are drawn as contours; hide some methods to rotate the others.` : "This browser has no WebGL: surfaces are drawn as contours."
      : panel.text;
    for (const s of panel.options) {
      let figure = panel.scenes.querySelector(`[data-group="${s.group}"]`);
      if (!on[s.group]) {
        if (figure) { Plotly.purge(figure.querySelector(".plot")); figure.remove(); }
        continue;
      }
      if (!figure) {
        figure = document.createElement("figure");
        figure.dataset.group = s.group;
        const caption = document.createElement("figcaption");
        const chip = document.querySelector(`.chip[data-group="${s.group}"] svg`);
        caption.append(chip.cloneNode(true), groups[s.group].label);
        const plot = document.createElement("div");
        Object.assign(plot, { className: "plot", tabIndex: 0 });
        plot.setAttribute("role", "img");
        plot.setAttribute("aria-label", `Loss surface of ${groups[s.group].label}`);
        figure.append(caption, plot);
        const after = [...panel.scenes.children].find((f) => Number(f.dataset.group) > s.group);
        panel.scenes.insertBefore(figure, after || null);
        keys(plot, (to) => turn(panel, null, to));
      }
      const plot = figure.querySelector(".plot");
      const cut = (v) => (height(v) === null ? null : Math.min(height(v), high));
      const common = { x: s.x, y: s.y, z: s.loss.map((row) => row.map(cut)), customdata: s.loss, colorscale: "Cividis", showscale: false };
      if (plot.data && (plot.data[0].type === "surface") !== solid) Plotly.purge(plot);
      const fresh = !plot.data;
      const hover = "x %{x:.3g}, y %{y:.3g}: loss %{customdata:.4g}<extra></extra>";
      if (solid) {
        const side = (title) => ({ title: { text: title }, gridcolor: paint("--line"), color: paint("--soft"), tickfont: { size: 10 } });
        Plotly.react(plot, [{ ...common, type: "surface", cmin: low, cmax: high, hovertemplate: hover }], look({
          margin: { l: 0, r: 0, t: 0, b: 0 }, dragmode: "turntable",
          scene: { camera, aspectmode: "manual", aspectratio: { x: 1, y: 1, z: 0.7 }, xaxis: side(""), yaxis: side(""), zaxis: { ...side(""), range: [low, high] } },
        }), config);
        if (fresh) {
          for (const event of ["plotly_relayouting", "plotly_relayout"]) {
            plot.on(event, (what) => { if (what["scene.camera"] && !turning) turn(panel, plot, what["scene.camera"]); });
          }
        }
      } else {
        Plotly.react(plot, [{
          ...common, type: "contour", zmin: low, zmax: high, autocontour: false, hovertemplate: hover,
          contours: { start: low, end: high, size: (high - low) / 20 || 1 }, line: { width: 0.5 },
        }], look({ margin: { l: 34, r: 6, t: 6, b: 28 }, xaxis: axis(""), yaxis: axis("", { scaleanchor: "x" }) }), config);
      }
    }
  }

  function keys(plot, turned) {
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      const zoom = { "+": 0.8, "=": 0.8, "-": 1.25 }[event.key];
      if ((!step && !zoom && event.key !== "0") || !plot.data || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      if (plot.data.length && plot.data[0].type === "surface") {
        const { x, y, z } = camera.eye;
        const flat = Math.hypot(x, y), far = Math.hypot(flat, z) * (zoom || 1);
        const around = Math.atan2(y, x) + (step ? step[0] * 0.15 : 0);
        const up = Math.min(1.5, Math.max(-1.5, Math.atan2(z, flat) + (step ? step[1] * 0.12 : 0)));
        const eye = { x: far * Math.cos(up) * Math.cos(around), y: far * Math.cos(up) * Math.sin(around), z: far * Math.sin(up) };
        turned(event.key === "0" ? { eye: { x: 1.35, y: 1.35, z: 1.45 } } : { ...camera, eye });
        return;
      }
      const { xaxis, yaxis } = plot._fullLayout;
      if (event.key === "0") { Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true }); return; }
      const moved = {};
      for (const [name, { range }, by] of [["xaxis", xaxis, step && step[0]], ["yaxis", yaxis, step && step[1]]]) {
        const [a, b] = range.map(Number), middle = (a + b) / 2, half = ((b - a) / 2) * (zoom || 1), shift = step ? by * 0.15 * (b - a) : 0;
        moved[`${name}.range`] = [middle - half + shift, middle + half + shift];
      }
      Plotly.relayout(plot, moved);
    });
  }

  const DRAW = { curves, heat, surfaces, sweep };
  const live = panels.map((panel, i) => {
    const box = document.querySelector(`[data-panel="${i}"]`);
    const found = { ...panel, box, chosen: 0, view: "3-D", near: false, stale: true };
    found.plot = box.querySelector(":scope > .plot");
    found.caption = box.querySelector(".caption");
    found.text = found.caption.textContent;
    if (found.plot) keys(found.plot);
    if (panel.kind === "surfaces") {
      found.scenes = box.querySelector(".scenes");
      found.log = box.querySelector("[data-log]");
      found.range = box.querySelector("[data-range]");
      found.log.addEventListener("change", () => refresh(found));
      box.querySelector("[data-view]").addEventListener("change", (e) => { found.view = e.target.value; refresh(found); });
    }
    const choose = box.querySelector("[data-choose]");
    if (choose) choose.addEventListener("change", () => { found.chosen = Number(choose.value); refresh(found); });
    return found;
  });

  function refresh(panel) {
    panel.stale = !panel.near;
    if (panel.near) DRAW[panel.kind](panel);
  }
  // Only what is near the window is drawn, so that a page of many charts opens and toggles at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = live.find((one) => one.box === entry.target);
      panel.near = entry.isIntersecting;
      if (panel.near && panel.stale) refresh(panel);
    }
    root.dataset.ready = "yes";
  }, { rootMargin: "400px 0px" });
  live.forEach((panel) => watcher.observe(panel.box));
  addEventListener("beforeprint", () => live.forEach((panel) => { if (panel.stale) { panel.stale = false; DRAW[panel.kind](panel); } }));

  const chips = [...document.querySelectorAll(".chip[data-group]")];
  function toggled() {
    chips.forEach((chip) => chip.setAttribute("aria-pressed", on[Number(chip.dataset.group)]));
    document.querySelectorAll("tr[data-group]").forEach((row) => row.classList.toggle("off", !on[Number(row.dataset.group)]));
    live.filter((panel) => panel.kind !== "heat").forEach(refresh);
  }
  chips.forEach((chip) => chip.addEventListener("click", () => {
    const g = Number(chip.dataset.group);
    on[g] = !on[g];
    toggled();
  }));
  chips.forEach((chip) => chip.addEventListener("dblclick", () => {
    const g = Number(chip.dataset.group);
    on.forEach((_, i) => { on[i] = i === g; });
    toggled();
  }));
  for (const [id, value] of [["all", true], ["none", false]]) {
    const button = document.getElementById(id);
    if (button) button.addEventListener("click", () => { on.fill(value); toggled(); });
  }
  for (const id of Object.keys(drawn)) {
    const list = document.getElementById(id);
    if (list) list.addEventListener("change", () => {
      drawn[id] = id === "against" ? list.value : Number(list.value);
      live.filter((panel) => panel.kind === "curves").forEach(refresh);
    });
  }
  const save = document.getElementById("curves-csv");
  if (save) save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "curves.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  const kept = (() => { try { return localStorage.getItem("fedlesam-theme"); } catch { return null; } })();
  const system = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) { root.dataset.theme = name; live.forEach(refresh); }
  theme(kept === "dark" || kept === "light" ? kept : system.matches ? "dark" : "light");
  system.addEventListener("change", () => { if (!kept) theme(system.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    theme(dark() ? "light" : "dark");
    try { localStorage.setItem("fedlesam-theme", root.dataset.theme); } catch { /* a page that may not remember still works */ }
  });
})();
