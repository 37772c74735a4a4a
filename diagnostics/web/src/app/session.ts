// Who asks: a token is exchanged for a cookie that scripts cannot read.

import { signal } from "@preact/signals";

import { forgetAnswers, isSignedOut, send } from "../api/client";
import { job, overview, readJob } from "./job";

export const isSigningIn = signal(false);

/** Raises ApiError where the token is not taken. */
export async function signIn(token: string): Promise<void> {
  isSigningIn.value = true;
  try {
    await send("POST", "session", { token });
    forgetAnswers();
    isSignedOut.value = false;
    await readJob();
  } finally {
    isSigningIn.value = false;
  }
}

export async function signOut(): Promise<void> {
  await send("DELETE", "session");
  forgetAnswers();
  job.value = null;
  overview.value = null;
  await readJob();
}
