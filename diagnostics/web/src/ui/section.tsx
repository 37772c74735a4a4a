// A section of a view: a heading with note and controls, and content below a hairline.

import type { ComponentChildren, JSX } from "preact";
import { useId } from "preact/hooks";

interface SectionProps {
  title: string;
  /** Small text after the title: a count, a unit, a start time. */
  note?: ComponentChildren;
  /** Controls and links at the right. */
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

/** The heading of a view. */
export function ViewHead({ title, note, children }: { title: string; note?: ComponentChildren; children?: ComponentChildren }): JSX.Element {
  return (
    <header class="view-head">
      <h1 tabIndex={-1}>{title}</h1>
      {note === undefined ? null : <span class="section-note">{note}</span>}
      {children === undefined ? null : <div class="section-tools">{children}</div>}
    </header>
  );
}
