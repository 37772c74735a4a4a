// Signing in and out: a token is exchanged for a cookie that scripts cannot read, and for a secret that other ports cannot.

import { signal } from "@preact/signals";

import { forgetAnswers, isSignedOut, keepPageSecret, send } from "../api/client";
import type { SessionDocument } from "../api/documents";
import { epoch } from "../api/live";
import { job, overview, readJob } from "./job";
import { isList } from "./place";

export const isSigningIn = signal(false);

/** Sign in. Throws ApiError if the token is rejected. */
export async function signIn(token: string): Promise<void> {
  isSigningIn.value = true;
  try {
    const session = await send<SessionDocument>("POST", "session", { token });
    keepPageSecret(session?.page_secret ?? null);
    forgetAnswers();
    isSignedOut.value = false;
    await readAgain();
  } finally {
    isSigningIn.value = false;
  }
}

export async function signOut(): Promise<void> {
  await send("DELETE", "session");
  keepPageSecret(null);
  forgetAnswers();
  job.value = null;
  overview.value = null;
  await readAgain();
}

/** Read the data again as the new user. The list of jobs reads again when the epoch changes. */
async function readAgain(): Promise<void> {
  if (isList) {
    epoch.value += 1;
  } else {
    await readJob();
  }
}
