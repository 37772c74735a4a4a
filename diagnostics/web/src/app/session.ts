// Signing in and out: a token is exchanged for a cookie that scripts cannot read.

import { signal } from "@preact/signals";

import { forgetAnswers, isSignedOut, send } from "../api/client";
import { epoch } from "../api/live";
import { job, overview, readJob } from "./job";
import { isList } from "./place";

export const isSigningIn = signal(false);

/** Sign in. Throws ApiError if the token is rejected. */
export async function signIn(token: string): Promise<void> {
  isSigningIn.value = true;
  try {
    await send("POST", "session", { token });
    forgetAnswers();
    isSignedOut.value = false;
    await readAgain();
  } finally {
    isSigningIn.value = false;
  }
}

export async function signOut(): Promise<void> {
  await send("DELETE", "session");
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
