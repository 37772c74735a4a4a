// A runbook as numbered steps: text, tables, and commands with copy buttons.

import "./runbooks.css";

import type { JSX } from "preact";

import type { RunbookBlockDocument, RunbookDocument, RunbookStepDocument, TextDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { CopyButton } from "../../ui/controls";

/** Return the link to a runbook, "health.md#recovering"; `own` is the runbook that contains a bare "#part". */
export function runbookHref(target: string, incident: string, own = ""): string {
  const [name = "", step] = target.split("#");
  return hrefOf(["runbooks", name === "" ? own : name], { round: null, incident, step });
}

interface About {
  runbook: RunbookDocument;
}

function Texts({ texts, runbook }: About & { texts: readonly TextDocument[] }): JSX.Element {
  return (
    <>
      {texts.map((one, index) => {
        switch (one.kind) {
          case "code":
            return <code key={index}>{one.text}</code>;
          case "strong":
            return <strong key={index}>{one.text}</strong>;
          case "runbook":
            return (
              <a key={index} href={runbookHref(one.target, runbook.incident_id, runbook.name)}>
                {one.text}
              </a>
            );
          case "document":
            return (
              <span key={index} class="document-name" title={`See ${one.target} of the project`}>
                {one.text}
              </span>
            );
          default:
            return one.text;
        }
      })}
    </>
  );
}

function Commands({ block }: { block: RunbookBlockDocument }): JSX.Element {
  return (
    <div class="commands">
      {block.commands.map((command) => (
        <div key={command} class="command" data-command={command}>
          <code>{command}</code>
          <CopyButton text={command}>Copy</CopyButton>
        </div>
      ))}
      {block.example === "" ? null : (
        <details class="example">
          <summary>Example output from another job</summary>
          <pre tabIndex={0}>{block.example}</pre>
        </details>
      )}
    </div>
  );
}

function Block({ block, runbook }: About & { block: RunbookBlockDocument }): JSX.Element {
  if (block.kind === "commands") {
    return <Commands block={block} />;
  }
  if (block.kind === "table") {
    const [head = [], ...rows] = block.rows;
    return (
      <div class="table-box">
        <table>
          <thead>
            <tr>
              {head.map((cell, index) => (
                <th key={index} scope="col">
                  <Texts texts={cell} runbook={runbook} />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, number) => (
              <tr key={number}>
                {row.map((cell, index) => (
                  <td key={index}>
                    <Texts texts={cell} runbook={runbook} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    );
  }
  return (
    <p class={block.kind === "item" ? "item" : undefined}>
      <Texts texts={block.texts} runbook={runbook} />
    </p>
  );
}

interface StepsProps extends About {
  /** The anchor of the step that is expanded; null: the first one. */
  open: string | null;
}

export function RunbookSteps({ runbook, open }: StepsProps): JSX.Element {
  const isOpen = (step: RunbookStepDocument, index: number): boolean => (open === null ? index === 0 : step.anchor === open);
  return (
    <ol class="steps" data-runbook={runbook.name}>
      {runbook.steps.map((step, index) => (
        <li key={step.anchor}>
          <details open={isOpen(step, index)}>
            <summary>{step.title}</summary>
            <div class="step">
              {step.blocks.map((block, number) => (
                <Block key={number} block={block} runbook={runbook} />
              ))}
            </div>
          </details>
        </li>
      ))}
    </ol>
  );
}
