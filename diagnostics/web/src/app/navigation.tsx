// The list of views at the left: each with its key, and a count of items that need attention.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { isChoosing } from "./keyboard";
import { job, overview } from "./job";
import { hrefOf, useRoute } from "./location";
import { Chevron } from "../ui/icons";
import { viewNamed, VIEWS, type View } from "./views";

function attentionCount(view: View): { text: string; title: string } | null {
  const status = overview.value;
  if (status === null) {
    return null;
  }
  if (view.name === "incidents" && status.num_open_incidents > 0) {
    return { text: String(status.num_open_incidents), title: status.num_open_incidents === 1 ? "open incident" : "open incidents" };
  }
  if (view.name === "hosts" && status.hosts.lost + status.hosts.unfit > 0) {
    return { text: String(status.hosts.lost + status.hosts.unfit), title: status.hosts.lost + status.hosts.unfit === 1 ? "lost or unfit host" : "lost or unfit hosts" };
  }
  if (view.name === "actions" && status.next_action.verdict_id !== "") {
    return { text: "1", title: "verdict waiting for a decision" };
  }
  return null;
}

function Count({ view }: { view: View }): JSX.Element | null {
  const count = attentionCount(view);
  return count === null ? null : (
    <span class="nav-count" title={count.title}>
      {count.text}
      <span class="visually-hidden"> {count.title}</span>
    </span>
  );
}

function Item({ view, isHere }: { view: View; isHere: boolean }): JSX.Element {
  return (
    <li>
      <a href={hrefOf(view.name)} aria-current={isHere ? "page" : undefined} aria-keyshortcuts={`g ${view.key}`}>
        <span class="nav-label">{view.label}</span>
        <Count view={view} />
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
  const { view: here, rest } = useRoute();
  const [isOpen, setIsOpen] = useState(false);
  useEffect(() => setIsOpen(false), [here, rest.join("/")]);
  return (
    <nav class="nav" aria-label="Views">
      <button type="button" class="nav-toggle" aria-expanded={isOpen} aria-controls="views" onClick={() => setIsOpen(!isOpen)}>
        <Chevron isUp={isOpen} />
        <span class="nav-label">{viewNamed(here)?.label ?? "Views"}</span>
        {isOpen ? null : VIEWS.map((view) => <Count key={view.name} view={view} />)}
      </button>
      <div id="views" class={isOpen ? "nav-groups is-open" : "nav-groups"}>
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
      </div>
      <p class="nav-foot">
        megatrain {job.value?.version ?? ""}
        <br />
        press <kbd>?</kbd> for shortcuts
      </p>
    </nav>
  );
}
