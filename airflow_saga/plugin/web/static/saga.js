// What the tab does in the browser: it takes on Airflow's look, stays up to date, and sends what a person decides.
// The frame's sandbox blocks confirm(), alert() and links that leave it, so questions and ways out are made here.
"use strict";

const CALM_SECONDS = 10, ANSWER_SECONDS = 20, PROBE_SECONDS = 60, SAID_SECONDS = 3;
const byId = (id) => document.getElementById(id);

// -- Airflow's look: this frame is of the same origin, so its colours and its theme can be read ---------------------

const LOOK = { "--bg": "--chakra-colors-bg", "--panel": "--chakra-colors-bg-muted", "--fg": "--chakra-colors-fg", "--line": "--chakra-colors-border" };

function outside() {
  try { return window.parent !== window && window.parent.document ? window.parent : null; } catch { return null; }
}

function takeOnLook() {
  const root = document.documentElement, around = outside();
  if (!around) {
    root.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
    return;
  }
  const theirs = around.document.documentElement, style = around.getComputedStyle(theirs);
  root.classList.toggle("dark", theirs.classList.contains("dark"));
  for (const [ours, name] of Object.entries(LOOK)) {
    const colour = style.getPropertyValue(name).trim();
    if (colour) root.style.setProperty(ours, colour); else root.style.removeProperty(ours);
  }
}

takeOnLook();
if (outside()) new MutationObserver(takeOnLook).observe(outside().document.documentElement, { attributes: true, attributeFilter: ["class"] });

// -- times in the viewer's zone --------------------------------------------------------------------------------------

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const briefClock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

function localTimes(within) {
  for (const each of within.querySelectorAll("time[datetime]")) {
    const at = new Date(each.dateTime);
    if (isNaN(at)) continue;
    const today = at.toDateString() === new Date().toDateString();
    each.textContent = today ? clock.format(at) : `${day.format(at)} ${clock.format(at)}`;
    each.title = at.toISOString();
  }
  for (const each of within.querySelectorAll("[data-clock]")) each.textContent = (each.dataset.brief ? briefClock : clock).format(new Date(each.dataset.clock));
}

// -- up to date, without flicker: only a section that differs is swapped, and what was open or in focus stays so -----

let sections = new Map(), asking = false, timer = 0, saidAt = 0;

function remember() {
  sections = new Map([...document.querySelectorAll("main > section")].map((each) => [each.id, each.outerHTML]));
}

function take(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  document.body.dataset.pause = fresh.body.dataset.pause || String(CALM_SECONDS);
  const theirs = [...fresh.querySelectorAll("main > section")], main = document.querySelector("main");
  const heading = document.querySelector("h1")?.textContent;
  const focused = document.activeElement && document.activeElement.id;
  const next = new Map(theirs.map((each) => [each.id, each.outerHTML]));
  for (const id of sections.keys()) if (!next.has(id)) byId(id)?.remove();
  theirs.forEach((section, place) => {
    if (sections.get(section.id) === next.get(section.id)) return;
    const open = [...(byId(section.id)?.querySelectorAll("details[open]") || [])].map((each) => each.id);
    const old = byId(section.id), made = document.adoptNode(section);
    if (old) old.replaceWith(made); else main.insertBefore(made, main.children[place] || null);
    for (const id of open) { const each = byId(id); if (each) each.open = true; }
    localTimes(made);
  });
  const hasComeAbout = document.querySelector("h1")?.textContent !== heading && Date.now() - saidAt > SAID_SECONDS * 1000;
  if (hasComeAbout) byId("said").hidden = true;
  sections = next;
  if (focused && document.activeElement === document.body) byId(focused)?.focus();
}

async function refresh() {
  clearTimeout(timer);
  const began = Date.now();
  if (!asking && !document.hidden) {
    asking = true;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(ANSWER_SECONDS * 1000) });
      take(await answer.text());
      byId("offline").hidden = true;
    } catch {
      byId("offline").hidden = false;
    } finally {
      asking = false;
    }
  }
  const pause = 1000 * (byId("offline").hidden ? Number(document.body.dataset.pause) || CALM_SECONDS : 3);
  timer = setTimeout(refresh, Math.max(pause, 4 * (Date.now() - began)));  // a saga of thousands of actions is not asked for all the time
}

// -- deciding --------------------------------------------------------------------------------------------------------

function make(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function tell(message, isRefused) {
  const said = byId("said");
  said.textContent = message;
  said.classList.toggle("refused", isRefused);
  said.hidden = false;
  saidAt = Date.now();
}

async function call(path, body) {
  const init = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`${byId("head").dataset.api}/${path}`, { ...init, signal: AbortSignal.timeout(ANSWER_SECONDS * 1000) });
  return { ok: answer.ok, status: answer.status, data: await answer.json() };
}

const STAMP = /\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\+00:00/g;
const inZone = (text) => text.replace(STAMP, (stamp) => clock.format(new Date(stamp.replace(" ", "T"))));

// What an undo would do, in its order, with what the verify probes said of what is in doubt.
function planned(plan) {
  if (!plan.actions.length) return make("p", { textContent: "Nothing stands: an undo would call nothing." });
  const list = make("ol");
  for (const each of plan.actions) {
    const line = make("li", {}, make("b", { textContent: each.name }), ` of ${each.step}: ${each.expected}`);
    if (each.expected === "cannot be undone") line.className = "warn";
    if (each.probe) line.append(make("span", { className: "why", textContent: `; its probe: ${inZone(each.probe)}` }));
    list.append(line);
  }
  const stand = plan.actions.filter((each) => each.expected === "cannot be undone").length;
  const counts = `${plan.actions.length - stand} to take back${stand ? `, ${stand} that cannot be undone` : ""}, in this order:`;
  return make("div", {}, make("p", { textContent: counts }), list);
}

// Fetch the plan, show it, and let it be signed by its hash; false where there is none to sign.
async function showPlan(shown, body) {
  const { ok, data } = await call(body.from_action ? `plan?from_action=${body.from_action}` : "plan");
  shown.replaceChildren(ok ? planned(data) : make("p", { textContent: data.message }));
  if (ok) body.plan = data.hash;
  if (ok && data.actions.some((each) => each.state === "IN_DOUBT")) shown.append(askProbes(shown, body));
  return ok;
}

function askProbes(shown, body) {
  const button = make("button", { type: "button", id: "ask-probes", textContent: "Ask what became of what is in doubt" });
  button.onclick = async () => {
    button.disabled = true;
    button.textContent = "Asking the verify probes…";
    const asked = Date.now();
    try {
      const { ok, data } = await call("probe", {});
      if (!ok) { button.textContent = data.message; return; }
      while (Date.now() - asked < PROBE_SECONDS * 1000 && shown.isConnected) {
        await new Promise((wake) => setTimeout(wake, 1000));
        const fresh = make("div");
        await showPlan(fresh, body);
        if (fresh.querySelector("ol")?.textContent !== shown.querySelector("ol")?.textContent) { shown.replaceChildren(...fresh.childNodes); return; }
      }
      button.textContent = "No answer yet: the plan shows it when it is there";
    } catch {
      button.textContent = "Airflow does not answer; nobody was asked";
    }
  };
  return button;
}

async function ask(button) {
  const { verb, about, plan: showsPlan, note, bare } = button.dataset, body = JSON.parse(button.dataset.body);
  const text = make("textarea", { id: "why", rows: 2, maxLength: 4000, required: Boolean(note) });
  const go = make("button", { type: "submit", className: "primary", textContent: button.textContent.replace("…", "") });
  const no = make("button", { type: "button", textContent: "Not now" });
  const shown = make("div");
  const form = make("form", { method: "dialog" }, make("h2", { id: "asked", textContent: button.textContent.replace("…", "") }),
    make("p", { textContent: about }), shown, ...(bare ? [] : [make("label", { htmlFor: "why", textContent: note || "Why? (for those who read it later)" }), text]),
    make("div", { className: "verbs" }, no, go));
  const dialog = make("dialog", {}, form);
  dialog.setAttribute("aria-labelledby", "asked");
  const close = () => { dialog.close(); dialog.remove(); byId(button.id)?.focus(); };
  no.onclick = close;
  dialog.oncancel = (event) => { event.preventDefault(); close(); };
  form.onsubmit = async (event) => {
    event.preventDefault();
    if (note && !text.value.trim()) { text.focus(); return; }
    if (text.value.trim()) body[note ? "note" : "reason"] = text.value.trim();
    go.disabled = true;
    await send(verb, body);
    close();
  };
  document.body.append(dialog);
  dialog.showModal();
  if (showsPlan) {
    go.disabled = true;
    shown.append(make("p", { className: "why", textContent: "Reading what an undo would do…" }));
    try {
      go.disabled = !await showPlan(shown, body);
    } catch {
      shown.replaceChildren(make("p", { textContent: "Airflow does not answer; what an undo would do cannot be shown." }));
    }
  }
}

async function send(verb, body) {
  try {
    const { ok, data } = await call(verb, body);
    tell([data.message, data.undo_run && data.undo_run.message].filter(Boolean).join(". "), !ok);
  } catch {
    tell("Airflow does not answer: it is not known whether this was heard. It may be sent again without harm.", true);
  }
  await refresh();
}

// -- ways out of the frame, and the rest -----------------------------------------------------------------------------

function leave(event, link) {
  const around = outside();
  if (!around || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  around.history.pushState({}, "", link.dataset.airflow);
  around.dispatchEvent(new PopStateEvent("popstate", { state: {} }));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-verb]"), link = event.target.closest("a[data-airflow]");
  if (button) ask(button);
  else if (link) leave(event, link);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
remember();
localTimes(document);
timer = setTimeout(refresh, 1000 * (Number(document.body.dataset.pause) || CALM_SECONDS));
