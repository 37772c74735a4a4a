// The job's description and health, as signals that all views use. The description is read when the page opens, after the stream
// of events was broken, and while a new round has no records; the health is read whenever it changes.

import { computed, effect, signal } from "@preact/signals";

import { asApiError, getJson, isSignedOut, type ApiError } from "../api/client";
import { epoch, newestStep, startLive, takeServerTime, unseenTicks, versions } from "../api/live";
import type { JobDocument, OverviewDocument, RoundDocument } from "../api/documents";
import { route } from "./location";

export const job = signal<JobDocument | null>(null);
export const jobError = signal<ApiError | null>(null);
/** The state and health of the job, shown in the header of every view. */
export const overview = signal<OverviewDocument | null>(null);
export const overviewError = signal<ApiError | null>(null);

/** The newest step. The stream reports a step before the overview does, because the server caches the overview for a second. */
export const shownStep = computed<number | null>(() => {
  const known = [overview.value?.step, newestStep.value].filter((step) => typeof step === "number");
  return known.length === 0 ? null : Math.max(...known);
});

/** The round that the URL names, else the newest that any rank reported; null if there is none. */
export const shownRound = computed<RoundDocument | null>(() => {
  const all = job.value?.rounds ?? [];
  const asked = route.value.params.get("round");
  const named = asked === null ? undefined : all.find((one) => String(one.number) === asked);
  return named ?? all[all.length - 1] ?? null;
});

/** Whether an older round is shown although a newer one exists. */
export const isPastShown = computed(() => {
  const all = job.value?.rounds ?? [];
  return shownRound.value !== null && shownRound.value.number !== all[all.length - 1]?.number;
});

/** The round that the URL names if it has no records, because they have expired or the link belongs to another job; else null. */
export const missingRound = computed<string | null>(() => {
  const asked = route.value.params.get("round");
  const isKnown = asked === null || job.value === null || job.value.rounds.some((one) => String(one.number) === asked);
  return isKnown ? null : asked;
});

let isStarted = false;
let jobTimer = 0;
const RETRY_MS = 2000;

export async function readJob(): Promise<void> {
  window.clearTimeout(jobTimer);
  try {
    const found = await getJson<JobDocument>("job");
    job.value = found;
    jobError.value = null;
    isSignedOut.value = false;
    if (!isStarted) {
      isStarted = true;
      startLive(found.is_recorded);
    }
  } catch (error) {
    jobError.value = asApiError(error);
    if (!isSignedOut.peek()) {
      jobTimer = window.setTimeout(() => void readJob(), RETRY_MS);
    }
  }
}

let isReading = false;
let isRequested = false;

async function readOverview(): Promise<void> {
  if (isReading) {
    isRequested = true;
    return;
  }
  isReading = true;
  do {
    isRequested = false;
    try {
      const found = await getJson<OverviewDocument>("overview");
      if (overview.peek() === null) {
        takeServerTime(found.at_unix_s); // before the first event of the stream, or if there is no stream
      }
      overview.value = found;
      overviewError.value = null;
    } catch (error) {
      overviewError.value = asApiError(error);
    }
  } while (isRequested);
  isReading = false;
}

/** Start reading. The health is read again when it changes, and periodically while the page is hidden. */
export function startJob(): void {
  void readJob();
  effect(() => {
    if (epoch.value > 0) {
      void readJob();
    }
  });
  const changes = computed(() => `${versions.value["overview"] ?? 0} ${epoch.value} ${unseenTicks.value}`);
  const shown = computed(() => `${job.value === null ? "" : "known"} ${changes.value}`);
  effect(() => {
    if (shown.value.startsWith("known")) {
      void readOverview();
    }
  });
  // A round begins before any of its ranks reports. Until one does, the job is read again with every event.
  effect(() => {
    void versions.value;
    const round = overview.value?.round ?? null;
    const known = job.peek();
    if (known !== null && round !== null && round > (known.rounds.at(-1)?.number ?? 0)) {
      void readJob();
    }
  });
}
