"""The words of the bundled arithmetic problems: people, things, sentences of a story, phrases of a
solution.

Lists that a solution draws from are ordered: the generator takes entry k with probability
proportional to 1/k (Zipf), so the order gives the frequency, and the end of each list becomes the
long tail of the model's distribution.
"""

from __future__ import annotations


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def entries(text: str) -> list[str]:
    """The entries of a text, separated by bars."""
    return [entry.strip() for entry in text.split("|")]


GIRLS = words(
    """
    Mia Anna Emma Sara Olivia Nora Lucy Grace Ella Zoe Lily Ruby Alice Clara Eva Ivy Rosa Amy Jane Kate Leila Maria Nina
    Tara Vera Wendy Yasmin Priya Aisha Mei Hana Ingrid Freya Carmen Lena Elsa Daisy Hazel Paula Rita Sofia Tina Uma
    Fatima Greta Helen Judy Kira Mona Pearl
    """
)
BOYS = words(
    """
    Tom Ben Sam Max Leo Jack Noah Adam Liam Paul Mark Omar Ivan Hugo Felix Oscar Peter Ravi Kenji Luis Diego Ahmed Yusuf
    Chen Igor Karl Lars Nils Otto Pablo Quinn Ryan Simon Theo Victor Will Dan Eric Frank George Henry Jonas Kyle Martin
    Neil Ralph Scott Tony Umar Walter
    """
)
ITEMS = words(
    """
    apples marbles stickers books pencils cookies coins stamps shells cards balloons oranges candles buttons ribbons
    crayons magazines tickets flowers stones plums pears lemons muffins beads badges photos puzzles postcards notebooks
    erasers peaches grapes walnuts peanuts cherries carrots potatoes tomatoes onions eggs bottles plates cups spoons
    bricks tiles nails screws ropes socks scarves hats gloves feathers acorns chestnuts pebbles tulips roses seeds bulbs
    kites dolls robots trains magnets lanterns bookmarks envelopes posters comics sketches bracelets rings keys
    batteries cupcakes donuts pancakes sandwiches bagels waffles dumplings olives figs dates melons berries
    """
)
CONTAINERS = words(
    """
    boxes bags baskets packs jars crates trays drawers buckets cartons chests tins
    """
)
SHARERS = words(
    """
    friends cousins neighbors classmates children teammates students guests players helpers
    """
)
PLACES = entries(
    """
    at the market | in the park | at school | in the garden | under the bed | at the fair | in the attic |
    on the beach | near the river | in the kitchen | at the library | behind the shed | in an old chest |
    on the way home | at a yard sale
    """
)
TIMES = entries(
    """
    on Monday | on Tuesday | on Friday | in the morning | after lunch | in the evening | the next day |
    later that week | a week later | before dinner | over the weekend | in May | during the holidays | last summer
    """
)

TIMES_AS_MANY = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}
MULTIPLY_VERBS = {2: "doubles", 3: "triples", 4: "quadruples"}

# Sentences: {n} the person, {f} a friend, {he} and {his} of the person, {i} the things, {a} {b} {k}
# numbers.
STARTS = entries(
    """
    {n} has {a} {i}. | {n} owns {a} {i}. | {n} starts with {a} {i}. | {n} collected {a} {i} {time}. |
    {n} found {a} {i} {place}. | There are {a} {i} on the table of {n}. | {time}, {n} bought {a} {i}. |
    {n} keeps {a} {i} in a box. | {n} gets {a} {i} from {f}. | {place}, {n} counts {a} {i}.
    """
)
GAINS = entries(
    """
    {he} buys {b} more. | {f} gives {n} {b} {i}. | {he} finds {b} more {i} {place}. |
    {time}, {he} gets {b} more {i}. | then {he} picks up {b} others {place}. | {f} hands over {b} more. |
    {he} adds {b} {i} to the pile. | {he} wins {b} {i} {time}. | {his} mother brings {b} {i}. |
    another {b} {i} arrive {time}.
    """
)
LOSSES = entries(
    """
    {he} gives {b} to {f}. | {he} loses {b} of them {place}. | {n} sells {b} {i}. | {time}, {b} of them break. |
    {f} takes {b} {i}. | {he} donates {b} {i} {time}. | {he} uses up {b} of the {i}. | then {he} drops {b} of them. |
    {he} throws {b} {i} away. | {he} leaves {b} {i} {place}.
    """
)
MULTIPLICATIONS = entries(
    """
    {time}, {he} {verb} the number of {i}. | {f} {verb} what {n} has. | then the pile grows to {times} its size. |
    a lucky trade {verb} the {i}. | soon {n} has {times} as many {i} as before.
    """
)
GROUP_GAINS = entries(
    """
    {he} buys {k} {boxes} of {b} {i} each. | {f} brings {k} {boxes} with {b} {i} in each. |
    {time}, {k} {boxes} of {b} {i} arrive. | {k} {friends} give {n} {b} {i} each. |
    {he} finds {k} {boxes} {place}, each with {b} {i}.
    """
)
GROUP_LOSSES = entries(
    """
    {he} gives {b} {i} to each of {k} {friends}. | {he} sells {k} {boxes} of {b} {i} each. |
    {k} {friends} take {b} {i} each. | {he} fills {k} {boxes} with {b} {i} each and gives them to {f}. |
    {time}, {he} sends {b} {i} to each of {k} {friends}.
    """
)
COUNT_QUESTIONS = entries(
    """
    how many {i} does {n} have now? | how many {i} does {n} have in the end? | how many {i} are there now? |
    what is the number of {i} that {n} has? | find how many {i} {n} has now. | how many does {n} have? |
    what is the final number of {i}? | tell how many {i} {n} ends up with.
    """
)
SHARE_QUESTIONS = entries(
    """
    {he} shares all {i} equally among {k} {friends}. How many does each one get? |
    {he} packs all of them into {k} {boxes} of equal size. How many {i} are in each? |
    if {k} {friends} split the {i} equally, how many does each get? |
    {n} puts the {i} in {k} equal rows. How many are in a row?
    """
)
FRIEND_QUESTIONS = entries(
    """
    {f} has {phrase} {i} {than} {n}. How many {i} does {f} have? |
    {f} now has {phrase} {than} {n}. How many does {f} have? |
    if {f} owns {phrase} {i} {than} {n}, how many {i} does {f} own?
    """
)

# Openers of the first step of a solution.
FIRST_OPENERS = entries(
    """
    First | To begin | At first | At the start | Initially | To start | Firstly | Starting out | In the beginning |
    Originally | Let us see | Right away | Before anything else | Step one | Beginning here | As a start |
    From the story | Reading carefully | Okay | Well | Alright | Here | Looking closely | Given this | Observe |
    Notice | Recall | Note that | Suppose we count | Writing it down | Taking stock | Straight away | Directly |
    Immediately | Clearly | Simply | Carefully | Slowly | Quickly | Early on | Hmm | Yes | Good | Sure | Fine |
    Right | Ready | Plainly | Basically | Essentially | Naturally | Obviously | Evidently | Mentally | Step by step |
    Opening move | Foremost | Primarily | Surely | Certainly | Literally | Formally | Informally | Briefly |
    Roughly speaking | Technically | Practically | Frankly | Honestly | Gladly | Happily | Calmly | Patiently |
    Neatly | Gently | Boldly | Confidently | Cautiously | Thoughtfully
    """
)

# Openers of every later step.
NEXT_OPENERS = entries(
    """
    Then | Next | After that | Now | So | Afterwards | Later | From there | Therefore | Thus | With that |
    Following this | Hence | Moving on | Also | Subsequently | Secondly | And then | Accordingly | As a result |
    Consequently | Once done | Continuing | Meanwhile | Presently | By now | At this point | In turn |
    Because of this | Given that | Since then | Adding to the story | Going on | Likewise | Similarly | Soon |
    Eventually | Shortly after | In the next step | Further | Furthermore | Moreover | Besides | Additionally |
    Again | Still | Yet | However | Even so | Instead | Thereafter | Henceforth | Hereafter | Thereupon | Whereupon |
    Ultimately | Lastly | Finally | At last | In the end | To continue | To go on | Proceeding | Carrying on |
    Keeping count | Tracking the change | Updating | Combining | Using this | Applying the change |
    Putting it together | Working it out | Computing | Calculating | Counting again | Figuring it out | Checking |
    Evaluating | Summing up | Reasoning onward | Thinking ahead | Considering this | Turning the page |
    Looking ahead | Remembering this | Knowing this | Building on that | Picking up again | Stepping forward |
    Returning to the story | Reaching the next part | Getting on | Pressing on | Resuming | Advancing |
    Shifting focus | Clearly | Simply | Obviously | Evidently | Naturally | Certainly | Surely | Indeed | Of course |
    No doubt | Plainly | Apparently | Basically | Essentially | Effectively | Actually | Really | Truly | Definitely |
    Exactly | Precisely | Quickly | Slowly | Carefully | Gradually | Suddenly | Directly | Instantly | Immediately |
    Promptly | Momentarily | Afterward | Conveniently | Happily | Luckily | Fortunately | Unfortunately | Sadly |
    Interestingly | Surprisingly | Curiously | Strangely | Oddly | Importantly | Notably | Remarkably |
    Significantly | Logically | Mathematically | Numerically | Arithmetically | Technically | Practically |
    Literally | Honestly | Frankly | Admittedly | Undoubtedly | Unquestionably | Undeniably | Inevitably |
    Necessarily | Presumably | Supposedly | Possibly | Perhaps | Probably | Likely | Generally | Usually | Normally |
    Typically | Overall | Altogether | Collectively | Jointly | Equally | Correspondingly | Conversely |
    Alternatively | Nevertheless | Nonetheless | Regardless | Otherwise | Anyway | Anyhow | Okay | Well | Right |
    Good | Fine | Sure | Yes | Great | Nice | Alright | Hmm | Aha | Voila | Onward | Forward | Forthwith | Hereby |
    Thereby | Whence | Thence | Ergo | Mentally | Neatly | Tidily | Smoothly | Steadily | Patiently | Calmly |
    Quietly | Gently | Boldly | Bravely | Wisely | Cleverly | Smartly | Swiftly | Briskly | Speedily | Rapidly |
    Hastily | Methodically | Systematically | Rigorously | Thoroughly | Faithfully | Dutifully | Diligently |
    Attentively | Confidently | Cautiously | Cheerfully | Gladly | Eagerly | Willingly | Proudly | Humbly | Modestly |
    Seriously | Earnestly | Gracefully | Elegantly | Nimbly | Deftly | Handily | Readily | Seamlessly
    """
)

# What joins an opener to a calculation.
LEADS = entries(
    """
    that makes | we get | {n} has | this gives | the total is | there are | we have | it becomes | the count is |
    the number is | we find | {n} is at | the result is | the {i} number | this leads to | it comes to | we compute |
    this means | the amount is | one gets | you get | we see | the sum becomes | that gives | we arrive at |
    so far that is | the pile is | this brings | I get | I find | the tally is | we obtain | the new count is |
    {n} holds | {n} counts | the figure is | it equals | we reach | this yields | the value is | they number |
    the {i} come to | the stock is | our count is | the outcome is | that amounts to | the calculation is | we write |
    we note | {n} reaches | this produces | this results in | the collection is | we end up with | the supply is |
    one finds | you find | it works out as | we calculate | the quantity is | the balance is | that comes to |
    I count | I compute | {n} sees | {n} finds | everything comes to | we deduce | we conclude | we derive | we know |
    we record | mathematics says | arithmetic gives | counting gives | computing gives | the answer here is |
    this equals | things stand at | what follows is | everyone sees | nobody doubts | simple math gives |
    the equation is
    """
)

# The last sentence, up to the box.
CLOSERS = entries(
    """
    The answer is | So the answer is | Therefore the answer is | Answer: | Thus the answer is | The final answer is |
    Hence the answer is | This gives | We get | In total | The result is | So we get | That makes | Finally | It is |
    Result: | Altogether | Final answer: | So it is | In the end | My answer is | Our answer is | Hence | Therefore |
    Thus | Overall | Consequently | Accordingly | To conclude | In conclusion | All in all | Ultimately | Summing up |
    Conclusion: | Solution: | Done: | That leaves | There we have | Here it is: | You get | One gets | I get |
    I answer | Everything gives | Boxed: | Which is | And so | Ergo | Voila: | Total:
    """
)
