// The theme takes each word of a query for the beginning of words, so "a" and "how" find nearly everything. Drop stop words,
// and words that are on every page, before a query reaches the search.
(() => {
  const STOP_WORDS = new Set(
    ("a able about across after all almost also am among an and any are as at be because been but by can cannot could dear did do does " +
      "either else ever every for from get got had has have he her hers him his how however i if in into is it its just least let " +
      "like likely may me might most must my neither no nor not of off often on only or other our own rather said say says she should " +
      "since so some than that the their them then there these they this tis to too twas us wants was we were what when where which " +
      "while who whom why will with would yet you your " +
      "pagepool up use using").split(" "),
  );
  const QUERY = 2; // the type of a message with a query
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message?.type === QUERY) {
      const words = message.data.split(/\s+/).filter((word) => !STOP_WORDS.has(word.toLowerCase()));
      if (words.length) message = { ...message, data: words.join(" ") };
    }
    return post.call(this, message, ...rest);
  };
})();
