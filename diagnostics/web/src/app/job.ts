// Who the job is: read when the page opens and again whenever the server began anew. All views read it from here.

import { computed, effect, signal } from "@preact/signals";

import { ApiError, getJson, isSignedOut } from "../api/client";
import { epoch, newestStep, startLive, takeServerTime, unseenTicks, versions } from "../api/live";
import type { JobDocument, OverviewDocument, RoundDocument } from "../api/documents";
import { route } from "./location";

export const job = signal<JobDocument | null>(null);
export const jobError = signal<ApiError | null>(null);
/** The health of the job: the header of every view shows it. */
export const overview = signal<OverviewDocument | null>(null);
export const overviewError = signal<ApiError | null>(null);

/** How far the job is: the stream reports a step before the overview, which the server keeps for a second. */
export const shownStep = computed<number | null>(() => {
  const known = [overview.value?.step, newestStep.value].filter((step) => typeof step === "number");
  return known.length === 0 ? null : Math.max(...known);
});

/** The round that the URL names, else the newest that any rank reported; null where there is none. */
export const shownRound = computed<RoundDocument | null>(() => {
  const all = job.value?.rounds ?? [];
  const asked = route.value.params.get("round");
  const named = asked === null ? undefined : all.find((one) => String(one.number) === asked);
  return named ?? all[all.length - 1] ?? null;
});

/** Whether a round of the past is looked at although a newer one is there. */
export const isPastShown = computed(() => {
  const all = job.value?.rounds ?? [];
  return shownRound.value !== null && shownRound.value.number !== all[all.length - 1]?.number;
});

/** The round that the URL names and of which nothing is known: a link to a round whose records have expired, or of another job. */
export const missingRound = computed<string | null>(() => {
  const asked = route.value.params.get("round");
  const isKnown = asked === null || job.value === null || job.value.rounds.some((one) => String(one.number) === asked);
  return isKnown ? null : asked;
});

function asApiError(error: unknown): ApiError {
  return error instanceof ApiError ? error : new ApiError(0, "unavailable", String(error));
}

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
let isWanted = false;

async function readOverview(): Promise<void> {
  if (isReading) {
    isWanted = true;
    return;
  }
  isReading = true;
  do {
    isWanted = false;
    try {
      const found = await getJson<OverviewDocument>("overview");
      if (overview.peek() === null) {
        takeServerTime(found.at_unix_s); // before the stream tells, or where there is none
      }
      overview.value = found;
      overviewError.value = null;
    } catch (error) {
      overviewError.value = asApiError(error);
    }
  } while (isWanted);
  isReading = false;
}

/** Begin to read. What has news is read again while anybody looks at the page. */
export function startJob(): void {
  void readJob();
  effect(() => {
    if (epoch.value > 0) {
      void readJob();
    }
  });
  const news = computed(() => `${versions.value["overview"] ?? 0} ${epoch.value} ${unseenTicks.value}`);
  const shown = computed(() => `${job.value === null ? "" : "known"} ${news.value}`);
  effect(() => {
    if (shown.value.startsWith("known")) {
      void readOverview();
    }
  });
  // A round begins before any of its ranks reports: until one has, the job is asked again with all that is news.
  effect(() => {
    void versions.value;
    const round = overview.value?.round ?? null;
    const known = job.peek();
    if (known !== null && round !== null && round > (known.rounds.at(-1)?.number ?? 0)) {
      void readJob();
    }
  });
}
