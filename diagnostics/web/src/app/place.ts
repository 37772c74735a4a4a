// What the page shows, derived from its path: the list of all jobs ("/jobs"), one of them ("/jobs/NAME/"), or the only job
// of a server for one job.

const found = /\/jobs(?:\/[^/]+\/)?$/.exec(window.location.pathname);

/** Whether the page is the list of all jobs. */
export const isList = found !== null && found[0] === "/jobs";

/** The path to the list of jobs from the page of one of them; null elsewhere. */
export const listHref = found !== null && !isList ? "../../jobs" : null;

/** The path of the server's root, the same for the list and for every job. */
export const rootPath = found === null ? window.location.pathname : `${window.location.pathname.slice(0, found.index)}/`;

/** Return the path of a job's page, relative to the list. */
export function pageOf(name: string): string {
  return `jobs/${encodeURIComponent(name)}/`;
}
