// The three questions first; then what the system does by itself, and how training went.

import "./overview.css";

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { IncidentsDocument, OverviewDocument } from "../../api/documents";
import { overview, overviewError, job } from "../../app/job";
import { ViewHead } from "../../ui/section";
import { ErrorState, Skeleton } from "../../ui/states";
import { ActionBar } from "../actions/action_bar";
import { KeyFigures } from "./key_figures";
import { LastIncident, NextAction, Trust } from "./what_next";
import { Questions } from "./questions";
import { SeriesCharts } from "./series_charts";

const JOB_ACTIONS = ["checkpoint", "restart", "stop", "diag-on", "diag-off"] as const;

function Answer({ told }: { told: OverviewDocument }): JSX.Element {
  const incidents = useResource<IncidentsDocument>("incidents", {}, "incidents");
  const all = incidents.data?.incidents ?? [];
  return (
    <>
      <Questions told={told} />
      <KeyFigures told={told} />
      <div class="columns three">
        <NextAction told={told} />
        <LastIncident incident={all[0] ?? null} num={told.num_incidents} isKnown={incidents.data !== null} />
        <Trust told={told} />
      </div>
      <SeriesCharts />
    </>
  );
}

export function OverviewView(): JSX.Element {
  const told = overview.value;
  return (
    <>
      <ViewHead title="Overview" note={job.value?.run_directory}>
        <ActionBar kinds={JOB_ACTIONS} target="" />
      </ViewHead>
      {told !== null ? (
        <Answer told={told} />
      ) : overviewError.value === null ? (
        <Skeleton lines={10} />
      ) : (
        <ErrorState error={overviewError.value} />
      )}
    </>
  );
}
