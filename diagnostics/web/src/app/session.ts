// Who asks: a token is exchanged for a cookie that scripts cannot read.

import { signal } from "@preact/signals";

import { forgetAnswers, isSignedOut, send } from "../api/client";
import { epoch } from "../api/live";
import { job, overview, readJob } from "./job";
import { isList } from "./place";

export const isSigningIn = signal(false);

/** Raises ApiError where the token is not taken. */
export async function signIn(token: string): Promise<void> {
  isSigningIn.value = true;
  try {
    await send("POST", "session", { token });
    forgetAnswers();
    isSignedOut.value = false;
    await readAnew();
  } finally {
    isSigningIn.value = false;
  }
}

export async function signOut(): Promise<void> {
  await send("DELETE", "session");
  forgetAnswers();
  job.value = null;
  overview.value = null;
  await readAnew();
}

/** Ask as who we are now; a list asks by itself once it is drawn again. */
async function readAnew(): Promise<void> {
  if (isList) {
    epoch.value += 1;
  } else {
    await readJob();
  }
}
