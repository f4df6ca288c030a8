// Asks the run for a newer report every ten seconds, while somebody is there to see it. The run itself never pauses.

const live = { everySeconds: 10, idleSeconds: 300, seen: Date.now(), isAsking: false, updated: null, wasPaused: false };

function isIdle() { return Date.now() - live.seen > 1000 * live.idleSeconds; }

function sayState(words) { byId("state").textContent = words; }

async function refresh() {
  if (live.isAsking || report.isDragging) return;
  live.isAsking = true;
  try {
    const answer = await fetch(location.href, { cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["summary", "gpus", "events", "about"]) byId(id).replaceWith(document.adoptNode(newer.getElementById(id)));
    await load(newer.getElementById("data").textContent);
    if (!isUtc) showTimes();
    live.updated = Date.now() / 1000;
    sayState(`Updated ${timeWords(live.updated)}, again every ${live.everySeconds} s`);
  } catch {
    const since = live.updated === null ? "" : ` What is shown is from ${timeWords(live.updated)}.`;
    sayState(`No answer: the run has ended, or its process is stuck.${since}`);
  } finally {
    live.isAsking = false;
  }
}

function beSeen() {
  live.seen = Date.now();
  if (live.wasPaused) { live.wasPaused = false; refresh(); }
}

function tick() {
  if (isIdle() || document.visibilityState === "hidden") {
    live.wasPaused = true;
    sayState("Paused, since nobody is here. The GPUs are still read; move the mouse to go on.");
    return;
  }
  refresh();
}

for (const kind of ["pointermove", "pointerdown", "keydown", "scroll", "visibilitychange", "focus"])
  addEventListener(kind, () => { if (document.visibilityState !== "hidden") beSeen(); }, { passive: true, capture: true });
byId("refresh").addEventListener("click", () => { live.seen = Date.now(); live.wasPaused = false; refresh(); });
live.updated = Date.now() / 1000;
sayState(`Updates every ${live.everySeconds} s`);
live.timer = setInterval(tick, 1000 * live.everySeconds);
