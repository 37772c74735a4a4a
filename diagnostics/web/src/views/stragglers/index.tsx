// Stragglers with causes, the breakdown of lost time, and the gain and cost of possible actions.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { StragglersDocument, WhatIfDocument } from "../../api/documents";
import { shownRound } from "../../app/job";
import { useNumberParam } from "../../app/location";
import { rangeQuery } from "../../app/range";
import { RoundSelect } from "../../app/round_select";
import { ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Findings } from "./findings";
import { Scores } from "./scores";
import { WhatIf } from "./what_if";

export function StragglersView(): JSX.Element {
  const number = shownRound.value?.number ?? null;
  const [first] = useNumberParam("first");
  const [last] = useNumberParam("last");
  const asked = number === null ? null : "stragglers";
  const stragglers = useResource<StragglersDocument>(asked, { round: number }, "stragglers");
  const whatIf = useResource<WhatIfDocument>(number === null ? null : "whatif", { round: number, first, last, ...rangeQuery() }, "timeline");
  if (number === null) {
    return (
      <>
        <ViewHead title="Stragglers and what-if" />
        <EmptyState title="No steps recorded yet">
          Stragglers are detected by comparing ranks that do the same work, over some tens of steps. Findings appear here after the
          first steps are recorded.
        </EmptyState>
      </>
    );
  }
  return (
    <>
      <ViewHead title="Stragglers and what-if" note={`round ${number}`}>
        <RoundSelect />
      </ViewHead>
      <Loaded resource={stragglers} none="No scores yet">
        {(document) => (
          <>
            <Findings document={document} />
            <div class="split">
              <WhatIf resource={whatIf} />
              <Scores document={document} />
            </div>
          </>
        )}
      </Loaded>
    </>
  );
}
