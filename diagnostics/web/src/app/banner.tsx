// What stands on top of every view because what is below it cannot be trusted otherwise.

import type { JSX } from "preact";

import { healthOf } from "../ui/badge";
import { ShapeIcon } from "../ui/icons";
import { overview } from "./job";

/** Without the diagnostics daemon charts, heat map and logs stand still, and nobody is found slow: said before all else. */
export function NoDaemon(): JSX.Element | null {
  const told = overview.value;
  if (told === null || healthOf(told) === "over" || told.diagnosis.is_daemon_alive !== false) {
    return null;
  }
  return (
    <p class="banner tone-bad" role="status" data-testid="no-daemon">
      <ShapeIcon shape="octagon" />
      <span>
        <strong>The diagnostics daemon does not run.</strong> Charts, heat map, timeline and logs stand still, and nobody is found
        slow. What etcd tells is current: state, hosts, incidents.
      </span>
    </p>
  );
}
