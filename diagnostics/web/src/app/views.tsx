// All views: their names, keys and components, in the order of a typical investigation.

import type { ComponentType } from "preact";

import { ActionsView } from "../views/actions";
import { AuditView } from "../views/audit";
import { CheckpointsView } from "../views/checkpoints";
import { HeatView } from "../views/heat";
import { HostsView } from "../views/hosts";
import { IncidentsView } from "../views/incidents";
import { LogsView } from "../views/logs";
import { NotesView } from "../views/notes";
import { OverviewView } from "../views/overview";
import { RanksView } from "../views/ranks";
import { RunbooksView } from "../views/runbooks";
import { StragglersView } from "../views/stragglers";
import { TimelineView } from "../views/timeline";

export interface View {
  /** The first part of the route. */
  name: string;
  label: string;
  /** Pressed after "g". */
  key: string;
  group: "job" | "time" | "records";
  component: ComponentType;
}

export const VIEWS: readonly View[] = [
  { name: "overview", label: "Overview", key: "o", group: "job", component: OverviewView },
  { name: "incidents", label: "Incidents", key: "i", group: "job", component: IncidentsView },
  { name: "hosts", label: "Hosts", key: "m", group: "job", component: HostsView },
  { name: "heat", label: "Heat map", key: "h", group: "time", component: HeatView },
  { name: "timeline", label: "Timeline", key: "t", group: "time", component: TimelineView },
  { name: "ranks", label: "Ranks", key: "r", group: "time", component: RanksView },
  { name: "stragglers", label: "Stragglers", key: "s", group: "time", component: StragglersView },
  { name: "logs", label: "Logs", key: "l", group: "records", component: LogsView },
  { name: "notes", label: "Notes", key: "n", group: "records", component: NotesView },
  { name: "checkpoints", label: "Checkpoints", key: "c", group: "records", component: CheckpointsView },
  { name: "runbooks", label: "Runbooks", key: "b", group: "records", component: RunbooksView },
  { name: "actions", label: "Actions", key: "x", group: "records", component: ActionsView },
  { name: "audit", label: "Audit", key: "a", group: "records", component: AuditView },
];

export function viewNamed(name: string): View | undefined {
  return VIEWS.find((view) => view.name === name);
}
