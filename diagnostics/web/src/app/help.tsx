// The keyboard shortcuts of the page, opened with "?".

import type { JSX } from "preact";

import { Dialog } from "../ui/dialog";
import { isHelpShown } from "./keyboard";
import { VIEWS } from "./views";

interface Keys {
  keys: readonly string[];
  what: string;
}

const PAGE: readonly Keys[] = [
  { keys: ["?"], what: "this help" },
  { keys: ["/"], what: "focus the search field of the view" },
  { keys: ["Esc"], what: "close a dialog, or leave a field" },
  { keys: ["Tab"], what: "next control; a focused picture takes the arrow keys" },
];

const PICTURES: readonly Keys[] = [
  { keys: ["\u2190", "\u2192", "\u2191", "\u2193"], what: "move the cursor in heat map, timeline and ranks" },
  { keys: ["Enter"], what: "open the item at the cursor" },
  { keys: ["+", "-"], what: "zoom" },
  { keys: ["0"], what: "show all" },
];

function KeyList({ title, list }: { title: string; list: readonly Keys[] }): JSX.Element {
  return (
    <section>
      <h3>{title}</h3>
      <dl class="keys">
        {list.map((entry) => (
          <div key={entry.what}>
            <dt>
              {entry.keys.map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{entry.what}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

export function Help(): JSX.Element | null {
  if (!isHelpShown.value) {
    return null;
  }
  const close = (): void => {
    isHelpShown.value = false;
  };
  return (
    <Dialog title="Keyboard shortcuts" onClose={close} className="wide">
      <div class="help-columns">
        <KeyList title="Views" list={VIEWS.map((view) => ({ keys: ["g", view.key], what: view.label }))} />
        <div>
          <KeyList title="Page" list={PAGE} />
          <KeyList title="Pictures" list={PICTURES} />
        </div>
      </div>
    </Dialog>
  );
}
