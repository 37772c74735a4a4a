// A part of a view: a heading, what belongs beside it, and content below a hairline.

import type { ComponentChildren, JSX } from "preact";
import { useId } from "preact/hooks";

interface SectionProps {
  title: string;
  /** Small and beside the title: a count, a unit, since when. */
  note?: ComponentChildren;
  /** Right of the title: controls and links. */
  tools?: ComponentChildren;
  className?: string;
  children: ComponentChildren;
}

export function Section({ title, note, tools, className, children }: SectionProps): JSX.Element {
  const label = useId();
  return (
    <section class={className === undefined ? "section" : `section ${className}`} aria-labelledby={label}>
      <header class="section-head">
        <h2 id={label}>{title}</h2>
        {note === undefined ? null : <span class="section-note">{note}</span>}
        {tools === undefined ? null : <div class="section-tools">{tools}</div>}
      </header>
      {children}
    </section>
  );
}

/** The heading of a view; the title of the window follows it. */
export function ViewHead({ title, note, children }: { title: string; note?: ComponentChildren; children?: ComponentChildren }): JSX.Element {
  return (
    <header class="view-head">
      <h1 tabIndex={-1}>{title}</h1>
      {note === undefined ? null : <span class="section-note">{note}</span>}
      {children === undefined ? null : <div class="section-tools">{children}</div>}
    </header>
  );
}
