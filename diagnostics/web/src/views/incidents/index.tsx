// Incidents and verdicts: the list of both, one incident, or one verdict, depending on the path of the route.

import type { JSX } from "preact";

import { useRoute } from "../../app/location";
import { IncidentDetail } from "./incident_detail";
import { IncidentList } from "./incident_list";
import { VerdictDetail } from "./verdict_detail";

export function IncidentsView(): JSX.Element {
  const [first, second] = useRoute().rest;
  if (first === "verdicts" && second !== undefined) {
    return <VerdictDetail id={second} />;
  }
  return first === undefined ? <IncidentList /> : <IncidentDetail id={first} />;
}
