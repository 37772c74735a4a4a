// The time of the page in whole seconds: what shows an age is drawn again as it grows, and only while somebody looks.

import { computed, signal } from "@preact/signals";

import { clockOffset } from "../api/live";

export const nowS = signal(Math.floor(Date.now() / 1000));

/** Changes every hour, so also at midnight wherever that is: what shows a date only where it is not of today is drawn again. */
export const hour = computed(() => Math.floor(nowS.value / 3600));

/** Changes every ten seconds: where a picture ends that ends now. */
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
