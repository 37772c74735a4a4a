// The sign-in page: the user pastes a token, and the browser stores a cookie that scripts cannot read.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { asApiError } from "../../api/client";
import { isSigningIn, signIn } from "../../app/session";

export function SessionView(): JSX.Element {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async (): Promise<void> => {
    setProblem("");
    try {
      await signIn(token.trim());
    } catch (error) {
      setProblem(asApiError(error).message);
    }
  };
  return (
    <main class="login">
      <form
        class="login-form"
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <h1>megatrain</h1>
        <p class="soft">This dashboard requires a token. Paste the token of a viewer or an operator.</p>
        <label class="field">
          <span>Token</span>
          <input
            type="password"
            name="token"
            autocomplete="current-password"
            required
            value={token}
            onInput={(event) => setToken(event.currentTarget.value)}
          />
          <span class="hint">The token is in the token file of the dashboard, which the user who runs the job can read.</span>
        </label>
        {problem === "" ? null : (
          <p class="outcome tone-bad" role="alert">
            {problem}
          </p>
        )}
        <button type="submit" class="button primary" disabled={token.trim() === "" || isSigningIn.value}>
          Sign in
        </button>
      </form>
    </main>
  );
}
