// What is typed or pasted into the search, without what is no word: the search takes ":", "-", "+", "~" and quotes for operators
// (a message with a colon in it finds nothing), and "no" or "is" for the beginnings of words, so that they count most.
const COMMON = new Set(("a an and are as at be but by can do does for from had has have how i if in into is it its my no not of on or our so "
  + "than that the their them then there these they this to too was we were what when where which while who why will with you your").split(" "));
const searched = (typed) => {
  const words = typed.replace(/[^\p{L}\p{N}_.]+/gu, " ").split(" ").map((word) => word.replace(/^\.+|\.+$/g, "")).filter(Boolean);
  const telling = words.filter((word) => !COMMON.has(word.toLowerCase()));
  return (telling.length ? telling : words).join(" ");
};
const QUERY = 2;
const plain = (message) => message?.type === QUERY ? { ...message, data: searched(message.data) } : message;
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) { return post.call(this, plain(message), ...rest); };

// Search from the file system. A browser refuses a worker whose script is a file, so there a frame does the worker's part:
// the frame runs the script, and messages of the page and of the script go between the two. Over http nothing changes.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      const page = inner.document;
      const load = (source) => new Promise((resolve, reject) => {
        const script = page.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: () => reject(new Error(source)) });
        page.head.append(script);
      });
      inner.postMessage = (data) => this.deliver(this, data);
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.ready = load(new URL(url, document.baseURI).href);
    }
    deliver(target, data) {
      const event = new MessageEvent("message", { data });
      target.dispatchEvent(event);
      if (target === this && this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.deliver(this.frame.contentWindow, plain(data)));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
