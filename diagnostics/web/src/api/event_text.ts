// The text of server-sent events.

/** Return the name and the data of an event; a comment has no data. */
export function parseEvent(block: string): { name: string; data: string } {
  let name = "message";
  const lines: string[] = [];
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const value = line.slice(at + 1).replace(/^ /, "");
    if (line.startsWith("event:")) {
      name = value;
    } else if (line.startsWith("data:")) {
      lines.push(value);
    }
  }
  return { name, data: lines.join("\n") };
}
