// The page of a server of many jobs: the list of jobs, or a comparison of runs. Each job has a separate page.

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";

import { isSignedOut } from "../api/client";
import { connection } from "../api/live";
import { useResource } from "../api/resource";
import type { JobsDocument } from "../api/documents";
import { useRoute } from "./location";
import { ConnectionState, SignOut, Switches } from "./header";
import { CompareView } from "../views/compare";
import { JobsView } from "../views/jobs";
import { SessionView } from "../views/session";

function Page(): JSX.Element {
  const compared = useRoute().params.get("compare") ?? "";
  const list = useResource<JobsDocument>("jobs", { count: 1 }, "jobs").data;
  const numRed = list?.counts.red ?? 0;
  const title = `${numRed > 0 ? `(${numRed}!) ` : ""}megatrain \u2013 ${compared === "" ? "Jobs" : "Compare runs"}`;
  useEffect(() => {
    document.title = title;
  }, [title]);
  return (
    <>
      <header class="header">
        <a class="header-job" href="jobs" title={list?.runs_directory}>
          megatrain
        </a>
        <span class="headline">{list === null || list.runs_directory === "" ? "" : `run directories in ${list.runs_directory}`}</span>
        <span class="header-right">
          <ConnectionState />
          <Switches />
          {list === null ? null : (
            <span class="role">
              <span class="role-name">{list.role}</span>
              {list.has_session ? <SignOut /> : null}
            </span>
          )}
        </span>
      </header>
      <main id="main" class="main view-jobs" tabIndex={-1} data-connection={connection.value}>
        {compared === "" ? <JobsView /> : <CompareView names={compared} />}
      </main>
    </>
  );
}

export function JobsShell(): JSX.Element {
  return isSignedOut.value ? <SessionView /> : <Page />;
}
