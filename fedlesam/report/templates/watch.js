"use strict";
(() => {
  const line = document.getElementById("live");
  const fields = [...document.querySelectorAll("select, input[type=checkbox]")];
  const chips = [...document.querySelectorAll(".chip[data-group]")];
  const value = (field) => (field.type === "checkbox" ? field.checked : field.value);
  const kept = (() => { try { return JSON.parse(sessionStorage.getItem("fedlesam-watch")); } catch { return null; } })();
  if (kept && kept.labels.join() === chips.map((chip) => chip.textContent).join()) {
    kept.hidden.forEach((i) => chips[i].click());
  }
  if (kept && kept.fields.length === fields.length) {
    fields.forEach((field, i) => {
      if (value(field) === kept.fields[i]) return;
      if (field.type === "checkbox") field.checked = kept.fields[i];
      else field.value = kept.fields[i];
      field.dispatchEvent(new Event("change"));
    });
  }
  if (kept) scrollTo(0, kept.scroll);
  function reload() {
    const hidden = chips.flatMap((chip, i) => (chip.getAttribute("aria-pressed") === "false" ? [i] : []));
    const labels = chips.map((chip) => chip.textContent);
    try { sessionStorage.setItem("fedlesam-watch", JSON.stringify({ hidden, labels, fields: fields.map(value), scroll: scrollY })); } catch { /* it then starts at the top */ }
    location.reload();
  }
  async function look() {
    try {
      const answer = await fetch("/state", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      if ((await answer.text()) !== line.dataset.state) { reload(); return; }
      line.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
    } catch { line.textContent = "not live: fedlesam watch has stopped"; }
    setTimeout(look, 2000);
  }
  look();
})();
