// What the page is about, told by its address: all jobs of a server of many ("/jobs"), one of them ("/jobs/NAME/"), or the
// one job of a server that shows no other.

const found = /\/jobs(?:\/[^/]+\/)?$/.exec(window.location.pathname);

/** The list of all jobs. */
export const isList = found !== null && found[0] === "/jobs";

/** One of many jobs: the list is two steps up. */
export const listHref = found !== null && !isList ? "../../jobs" : null;

/** Return the address of the page of a job of the list. */
export function pageOf(name: string): string {
  return `jobs/${encodeURIComponent(name)}/`;
}
