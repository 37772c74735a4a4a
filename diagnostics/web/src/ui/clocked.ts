// The current time in whole seconds. Components that show an age are drawn again each second while the page is visible.

import { computed, signal } from "@preact/signals";

import { clockOffset } from "../api/live";

export const nowS = signal(Math.floor(Date.now() / 1000));

/** Changes every hour, so also at midnight in most zones: times that omit today's date are drawn again. */
export const hour = computed(() => Math.floor(nowS.value / 3600));

/** The current time in steps of ten seconds: the end of charts that end now. */
export const recentS = computed(() => Math.floor(nowS.value / 10) * 10);

function tick(): void {
  nowS.value = Math.floor(Date.now() / 1000 + clockOffset.peek());
}

window.setInterval(() => {
  if (document.visibilityState === "visible") {
    tick();
  }
}, 1000);

clockOffset.subscribe(tick);
