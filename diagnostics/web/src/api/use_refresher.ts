// The Refresher of a component.

import { useEffect, useRef } from "preact/hooks";

import { Refresher } from "./refresher";

/**
 * Read at once whenever `query` changes, which aborts a running request, and again as soon as allowed when `version` changes.
 * `begin` is called once per query and returns the function that sends one request. With a null query nothing is requested.
 */
export function useRefresher(
  query: string | null,
  version: string,
  leastPauseMs: number,
  begin: () => (stop: AbortSignal) => Promise<void>,
): void {
  const refresher = useRef<Refresher | null>(null);
  const seen = useRef(version);
  useEffect(() => {
    if (query === null) {
      return undefined;
    }
    const own = new Refresher(begin(), leastPauseMs);
    refresher.current = own;
    seen.current = version;
    own.start();
    return () => {
      own.stop();
      refresher.current = null;
    };
  }, [query]);
  useEffect(() => {
    if (seen.current !== version) {
      seen.current = version;
      refresher.current?.changed();
    }
  }, [version]);
}
