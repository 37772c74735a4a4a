// What the browser keeps for this origin, port included. Where its storage is disabled, a value lasts until the page is closed.

const unstored = new Map<string, string>();

export function stored(key: string): string | null {
  try {
    return window.localStorage.getItem(key);
  } catch {
    return unstored.get(key) ?? null;
  }
}

export function store(key: string, value: string): void {
  try {
    window.localStorage.setItem(key, value);
  } catch {
    unstored.set(key, value);
  }
}

export function forget(key: string): void {
  unstored.delete(key);
  try {
    window.localStorage.removeItem(key);
  } catch {
    // nothing was stored
  }
}
