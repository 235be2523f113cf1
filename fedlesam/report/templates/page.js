"use strict";
(() => {
  const { groups, panels, pool } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const on = groups.map(() => true);
  const DASH = { "-": "solid", "--": "dash", ":": "dot", "-.": "dashdot" };
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

  function curves(panel) {
    const chart = panel.options[panel.chosen];
    const costs = (s) => (panel.against ? s.costs[panel.against] : s.x);
    const shown = chart.series.filter((s) => on[s.group] && costs(s) !== undefined);
    const traces = [];
    for (const s of shown) {
      const x = values(costs(s));
      if (s.low !== null) {
        const low = values(s.low), high = values(s.high);
        traces.push({
          x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself", type: "scatter",
          mode: "lines", line: { width: 0 }, fillcolor: clear(colour(s.group), dark() ? 0.22 : 0.16), hoverinfo: "skip",
          name: "", meta: { band: s.group },
        });
      }
      const range = s.low === null ? "" : "  (%{customdata[0]:.4g} to %{customdata[1]:.4g})";
      traces.push({
        x, y: values(s.mean), type: "scatter", mode: chart.points ? "lines+markers" : "lines",
        name: safe(groups[s.group].label), line: { color: colour(s.group), dash: DASH[groups[s.group].line], width: 2 },
        marker: { size: 6 }, meta: { group: s.group },
        customdata: s.low === null ? undefined : values(s.low).map((low, i) => [low, values(s.high)[i]]),
        hovertemplate: `%{y:.4g}${range}<extra>${safe(groups[s.group].label)}</extra>`,
      });
    }
    const once = shown.length > 0 && shown.every((s) => values(s.x).length === 1) && !panel.against;
    if (once) {  // a single look at each model: side by side, not on a line of rounds
      traces.splice(0, traces.length, ...shown.map((s) => {
        const [mean] = values(s.mean), low = s.low === null ? mean : values(s.low)[0], high = s.high === null ? mean : values(s.high)[0];
        return {
          x: [safe(groups[s.group].label)], y: [mean], type: "scatter", mode: "markers", name: safe(groups[s.group].label),
          marker: { size: 11, color: colour(s.group) }, meta: { group: s.group },
          error_y: { type: "data", symmetric: false, array: [high - mean], arrayminus: [mean - low], color: colour(s.group) },
          hovertemplate: `%{y:.4g}<extra>after round ${values(s.x)[0]}</extra>`,
        };
      }));
    }
    const y = axis(chart.y, { type: chart.log ? "log" : "linear", exponentformat: "power" });
    if (chart.floor && shown.length) {
      const means = shown.map((s) => values(s.mean));
      const tenth = Math.min(...means.map((m) => [...m].sort((a, b) => a - b)[Math.floor(0.1 * (m.length - 1))]));
      const top = Math.max(...shown.map((s) => Math.max(...values(s.high === null ? s.mean : s.high))));
      const bottom = Math.max(0, tenth - 5);
      y.range = [bottom, top + 0.04 * Math.max(top - bottom, 1)];
    }
    const label = panel.against || (once ? "" : chart.x);
    const revision = `${panel.chosen} ${panel.against} ${chart.floor ? on : ""}`;
    Plotly.react(panel.plot, traces, look({
      xaxis: axis(label, { rangemode: panel.against ? "tozero" : "normal", type: once ? "category" : "linear" }),
      yaxis: y, uirevision: revision, hovermode: shown.length <= 8 && !once ? "x unified" : "closest",
    }), { ...config, toImageButtonOptions: { format: "svg", filename: chart.key } });
    panel.plot.setAttribute("aria-label", `${chart.title}: a line chart of ${shown.map((s) => groups[s.group].label).join(", ")}`);
    panel.caption.textContent = chart.caption;
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

  const DRAW = { curves, heat, surfaces };
  const live = panels.map((panel, i) => {
    const box = document.querySelector(`[data-panel="${i}"]`);
    const found = { ...panel, box, chosen: 0, against: "", view: "3-D", near: false, stale: true };
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
  const against = document.getElementById("against");
  if (against) against.addEventListener("change", () => {
    live.filter((panel) => panel.learning).forEach((panel) => { panel.against = against.value; refresh(panel); });
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
