// The banner above every view when the data below it is incomplete.

import type { JSX } from "preact";

import { healthOf } from "../ui/badge";
import { ShapeIcon } from "../ui/icons";
import { overview } from "./job";

/**
 * Shown while the diagnostics daemon is down: charts, heat map, timeline and logs are not updated, and no stragglers are
 * detected.
 */
export function NoDaemon(): JSX.Element | null {
  const status = overview.value;
  if (status === null || healthOf(status) === "over" || status.diagnosis.is_daemon_alive !== false) {
    return null;
  }
  return (
    <p class="banner tone-bad" role="status" data-testid="no-daemon">
      <ShapeIcon shape="octagon" />
      <span>
        <strong>The diagnostics daemon is not running.</strong> Charts, heat map, timeline and logs are not updated, and no
        stragglers are detected. Data from etcd is current: state, hosts, incidents.
      </span>
    </p>
  );
}
