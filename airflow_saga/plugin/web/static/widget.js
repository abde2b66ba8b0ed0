// On Airflow's home page: how many sagas need a person. Nothing is shown where none does, or where that is not known.
// Airflow imports this file and gives it React as a global; there is nothing to build.
"use strict";

const { createElement, useEffect, useState } = globalThis.React;
const SHOWN_AT_MOST = 100, PAUSE_SECONDS = 30;
const waitingUrl = new URL(`../api/v1/sagas?waiting=true&limit=${SHOWN_AT_MOST}`, import.meta.url);

async function countWaiting() {
  const answer = await fetch(waitingUrl, { signal: AbortSignal.timeout(10000) });
  return answer.ok ? (await answer.json()).sagas.length : 0;
}

function words(count) {
  const shown = count < SHOWN_AT_MOST ? String(count) : `${count} or more`;
  return `${shown} ${count === 1 ? "saga needs" : "sagas need"} a person`;
}

function SagasThatWait() {
  const [count, setCount] = useState(0);
  useEffect(() => {
    let timer = 0, isGone = false;
    const look = async () => {
      try { const found = await countWaiting(); if (!isGone) setCount(found); } catch { /* what was known stays */ }
      if (!isGone) timer = setTimeout(look, PAUSE_SECONDS * 1000);
    };
    look();
    return () => { isGone = true; clearTimeout(timer); };
  }, []);
  if (count === 0) return null;
  const style = { display: "block", padding: "10px 14px", margin: "8px 0", borderRadius: "8px", borderLeft: "4px solid #b45309",
    background: "var(--chakra-colors-bg-muted)", color: "var(--chakra-colors-fg)", fontWeight: 600 };
  return createElement("a", { href: new URL("../../plugin/sagas", import.meta.url).pathname, style }, `! ${words(count)}`);
}

globalThis.SagasThatWait = SagasThatWait;
