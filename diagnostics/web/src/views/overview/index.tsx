// The overview: the three main questions, key figures, the next automatic action, and charts.

import "./overview.css";

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { IncidentsDocument, OverviewDocument } from "../../api/documents";
import { overview, overviewError, job } from "../../app/job";
import { ViewHead } from "../../ui/section";
import { ErrorState, Skeleton } from "../../ui/states";
import { ActionBar } from "../actions/action_bar";
import { KeyFigures } from "./key_figures";
import { DataGaps, LastIncident, NextAction } from "./what_next";
import { Questions } from "./questions";
import { SeriesCharts } from "./series_charts";
import { SourceLosses } from "./source_losses";

const JOB_ACTIONS = ["checkpoint", "restart", "stop", "diag-on", "diag-off"] as const;

function Answer({ status }: { status: OverviewDocument }): JSX.Element {
  const incidents = useResource<IncidentsDocument>("incidents", {}, "incidents");
  const all = incidents.data?.incidents ?? [];
  return (
    <>
      <Questions status={status} />
      <KeyFigures status={status} />
      <div class="columns three">
        <NextAction status={status} />
        <LastIncident incident={all[0] ?? null} num={status.num_incidents} isKnown={incidents.data !== null} />
        <DataGaps status={status} />
      </div>
      <SeriesCharts />
      <SourceLosses />
    </>
  );
}

export function OverviewView(): JSX.Element {
  const status = overview.value;
  return (
    <>
      <ViewHead title="Overview" note={job.value?.run_directory}>
        <ActionBar kinds={JOB_ACTIONS} target="" />
      </ViewHead>
      {status !== null ? (
        <Answer status={status} />
      ) : overviewError.value === null ? (
        <Skeleton lines={10} />
      ) : (
        <ErrorState error={overviewError.value} />
      )}
    </>
  );
}
