// The views, left of the page: each with its key, and a count where something waits there.

import type { JSX } from "preact";

import { isChoosing } from "./keyboard";
import { job, overview } from "./job";
import { hrefOf, useRoute } from "./location";
import { VIEWS, type View } from "./views";

function waiting(view: View): { text: string; title: string } | null {
  const told = overview.value;
  if (told === null) {
    return null;
  }
  if (view.name === "incidents" && told.num_open_incidents > 0) {
    return { text: String(told.num_open_incidents), title: "open incidents" };
  }
  if (view.name === "hosts" && told.hosts.lost + told.hosts.unfit > 0) {
    return { text: String(told.hosts.lost + told.hosts.unfit), title: "hosts that are lost or unfit" };
  }
  if (view.name === "actions" && told.next_action.verdict_id !== "") {
    return { text: "1", title: "a verdict waits for a person" };
  }
  return null;
}

function Item({ view, isHere }: { view: View; isHere: boolean }): JSX.Element {
  const count = waiting(view);
  return (
    <li>
      <a href={hrefOf(view.name)} aria-current={isHere ? "page" : undefined} aria-keyshortcuts={`g ${view.key}`}>
        <span class="nav-label">{view.label}</span>
        {count === null ? null : (
          <span class="nav-count" title={count.title}>
            {count.text}
            <span class="visually-hidden"> {count.title}</span>
          </span>
        )}
        {isChoosing.value ? <kbd aria-hidden="true">{view.key}</kbd> : null}
      </a>
    </li>
  );
}

const GROUPS = [
  { name: "job", label: "Job" },
  { name: "time", label: "Where time goes" },
  { name: "records", label: "Records" },
] as const;

export function Navigation(): JSX.Element {
  const here = useRoute().view;
  return (
    <nav class="nav" aria-label="Views">
      {GROUPS.map((group) => (
        <div key={group.name} class="nav-group">
          <p class="nav-title" id={`nav-${group.name}`}>
            {group.label}
          </p>
          <ul aria-labelledby={`nav-${group.name}`}>
            {VIEWS.filter((view) => view.group === group.name).map((view) => (
              <Item key={view.name} view={view} isHere={view.name === here} />
            ))}
          </ul>
        </div>
      ))}
      <p class="nav-foot">
        megatrain {job.value?.version ?? ""}
        <br />
        press <kbd>?</kbd> for keys
      </p>
    </nav>
  );
}
