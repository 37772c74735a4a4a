// Placeholders for data: empty, failed, loading. Empty and error states name what is missing, the reason and what to do.

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

const ADVICE: Record<string, string> = {
  "forbidden": "Ask a person who has the operator token.",
  "not-found": "It may have been removed, or the link may belong to another job. Go back to the list.",
  "too-many": "Wait a few seconds: the server limits concurrent requests.",
  "unavailable": "The page retries automatically. If this persists, read the log of the dashboard.",
  "too-large": "Select less data: fewer steps or fewer ranks.",
  "bad-request": "Change the parameter named above, or open the view again from the list at the left.",
};

export function ErrorState({ error, onRetry }: { error: ApiError; onRetry?: () => void }): JSX.Element {
  return (
    <div class="state-box state-error" role="alert">
      <p class="state-title">{error.status === 0 ? "No answer" : "Cannot show this"}</p>
      <p>{error.message}</p>
      <p class="state-action">{ADVICE[error.code] ?? "Try again."}</p>
      {onRetry === undefined ? null : (
        <button type="button" class="button" onClick={onRetry}>
          Try again
        </button>
      )}
    </div>
  );
}

/** Placeholder lines while data loads; shown only after a short delay, so that quick answers do not flicker. */
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
  /** The title of the empty state for a 404, in views where that is not an error. */
  none?: string;
  children: (data: T) => ComponentChildren;
}

/** The loaded data, or the reason why there is none. If older data is shown, an error is a line above it. */
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
