// The server wants to know who asks: a token is pasted, and the browser keeps a cookie that no script can read.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { ApiError } from "../../api/client";
import { isSigningIn, signIn } from "../../app/session";

export function LoginView(): JSX.Element {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async (): Promise<void> => {
    setProblem("");
    try {
      await signIn(token.trim());
    } catch (error) {
      setProblem(error instanceof ApiError ? error.message : String(error));
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
        <p class="soft">This dashboard asks who you are. Paste the token of a viewer or an operator.</p>
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
          <span class="hint">It lies in the file that the dashboard was started with; whoever runs the job can read it.</span>
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
