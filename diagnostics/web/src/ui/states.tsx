// What stands where data should be: nothing there, not to be had, on its way. Each says what is missing, why, what to do.

import type { ComponentChildren, JSX } from "preact";

import type { ApiError } from "../api/client";
import { sentence } from "./format";

interface EmptyStateProps {
  /** What is missing: "No incident". */
  title: string;
  /** Why. */
  children: ComponentChildren;
  /** What to do: a command, a link. */
  action?: ComponentChildren;
}

export function EmptyState({ title, children, action }: EmptyStateProps): JSX.Element {
  return (
    <div class="state-box">
      <p class="state-title">{title}</p>
      <p>{children}</p>
      {action === undefined ? null : <p class="state-action">{action}</p>}
    </div>
  );
}

const WAYS_OUT: Record<string, string> = {
  "forbidden": "Ask somebody who has the operator's token.",
  "not-found": "It may have been removed, or the link may be of another job. Go back to the list.",
  "too-many": "Wait a few seconds: the server takes only so many questions at a time.",
  "unavailable": "It is tried again by itself. If it stays so, look at the log of the diagnostics daemon.",
  "too-large": "Choose less of it: fewer steps, or fewer ranks.",
  "bad-request": "Change the choice that is named, or open the view anew from the left.",
};

export function ErrorState({ error, onRetry }: { error: ApiError; onRetry?: () => void }): JSX.Element {
  return (
    <div class="state-box state-error" role="alert">
      <p class="state-title">{error.status === 0 ? "No answer" : "This cannot be shown"}</p>
      <p>{error.message}</p>
      <p class="state-action">{WAYS_OUT[error.word] ?? "Try it again."}</p>
      {onRetry === undefined ? null : (
        <button type="button" class="button" onClick={onRetry}>
          Try again
        </button>
      )}
    </div>
  );
}

/** Lines where text will be; shown only after a moment, so that quick answers do not flash. */
export function Skeleton({ lines = 6 }: { lines?: number }): JSX.Element {
  return (
    <div class="skeleton" role="status" aria-label="Loading">
      {Array.from({ length: lines }, (_, index) => (
        <span key={index} class={`skeleton-line width-${index % 4}`} />
      ))}
    </div>
  );
}

interface LoadedProps<T> {
  resource: { data: T | null; error: ApiError | null; reload: () => void };
  lines?: number;
  /** What is missing where the server says that there is none (404), which is nothing wrong then. */
  none?: string;
  children: (data: T) => ComponentChildren;
}

/** What was loaded; else why not. An error beside older data is a line above them. */
export function Loaded<T>({ resource, lines, none, children }: LoadedProps<T>): JSX.Element {
  const { data, error, reload } = resource;
  if (none !== undefined && error !== null && error.status === 404) {
    return <EmptyState title={none}>{sentence(error.message)}</EmptyState>;
  }
  if (data === null) {
    return error === null ? <Skeleton lines={lines ?? 6} /> : <ErrorState error={error} onRetry={reload} />;
  }
  return (
    <>
      {error === null ? null : (
        <p class="stale-line" role="status">
          Not up to date: {error.message}
        </p>
      )}
      {children(data)}
    </>
  );
}
