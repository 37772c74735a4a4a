// The list of runbooks, or one runbook as steps. For an incident the commands contain the names from that incident.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { RunbookDocument, RunbooksDocument } from "../../api/documents";
import { hrefOf, useParam, useRoute } from "../../app/location";
import { CopyButton } from "../../ui/controls";
import { ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { RunbookSteps, runbookHref } from "./steps";

function RunbookList(): JSX.Element {
  const found = useResource<RunbooksDocument>("runbooks");
  return (
    <>
      <ViewHead title="Runbooks" note="commands contain the names of this job" />
      <Loaded resource={found}>
        {({ runbooks }) =>
          runbooks.length === 0 ? (
            <EmptyState title="No runbooks">This installation contains no runbooks. They are in docs/runbooks of the project.</EmptyState>
          ) : (
            <ul class="runbook-list">
              {runbooks.map((one) => (
                <li key={one.name}>
                  <a href={runbookHref(one.name, "")}>{one.title}</a>
                </li>
              ))}
            </ul>
          )
        }
      </Loaded>
    </>
  );
}

function RunbookPage({ name }: { name: string }): JSX.Element {
  const [incident] = useParam("incident", "");
  const [step] = useParam("step", "");
  const found = useResource<RunbookDocument>(`runbooks/${encodeURIComponent(name)}`, { incident });
  return (
    <>
      <p class="crumbs">
        <a href={hrefOf("runbooks", { round: null })}>Runbooks</a> / {name}
        {incident === "" ? null : (
          <>
            {" "}
            for <a href={hrefOf(["incidents", incident])}>incident {incident}</a>
          </>
        )}
      </p>
      <ViewHead title={found.data?.title ?? name}>
        <CopyButton text={() => window.location.href}>Copy link</CopyButton>
      </ViewHead>
      <Loaded resource={found}>
        {(runbook) => <RunbookSteps key={`${name} ${step}`} runbook={runbook} open={step === "" ? null : step} />}
      </Loaded>
    </>
  );
}

export function RunbooksView(): JSX.Element {
  const [name] = useRoute().rest;
  return name === undefined ? <RunbookList /> : <RunbookPage name={name} />;
}
