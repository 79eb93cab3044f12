"""The demo model's training data: 64 countries, their continents and capitals, in English, Chinese and
Japanese.

There are two kinds of questions: the capital (a few tokens) and a description (two sentences, long enough to
stream). A question has three layouts: with a line break, with the two characters backslash and n (what a
shell sends for "\\n" in double quotes), and as a chat turn.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COUNTRIES", "LANGUAGES", "LAYOUTS", "Country", "answer", "prompt", "questions", "statements"]

LANGUAGES = ("en", "zh", "ja")
LAYOUTS = ("line", "escaped", "chat")
KINDS = ("capital", "about")


@dataclass(frozen=True)
class Country:
    """names, capitals: by language. continent: a key of CONTINENTS."""

    names: dict[str, str]
    capitals: dict[str, str]
    continent: str


CONTINENTS = {
    "Europe": {"en": "Europe", "zh": "欧洲", "ja": "ヨーロッパ"},
    "Asia": {"en": "Asia", "zh": "亚洲", "ja": "アジア"},
    "Africa": {"en": "Africa", "zh": "非洲", "ja": "アフリカ"},
    "NorthAmerica": {"en": "North America", "zh": "北美洲", "ja": "北アメリカ"},
    "SouthAmerica": {"en": "South America", "zh": "南美洲", "ja": "南アメリカ"},
    "Oceania": {"en": "Oceania", "zh": "大洋洲", "ja": "オセアニア"},
}

# country en | zh | ja | capital en | zh | ja | continent
TABLE = """
the United States|美国|アメリカ合衆国|Washington, D.C.|华盛顿|ワシントンD.C.|NorthAmerica
Canada|加拿大|カナダ|Ottawa|渥太华|オタワ|NorthAmerica
Mexico|墨西哥|メキシコ|Mexico City|墨西哥城|メキシコシティ|NorthAmerica
Cuba|古巴|キューバ|Havana|哈瓦那|ハバナ|NorthAmerica
Jamaica|牙买加|ジャマイカ|Kingston|金斯敦|キングストン|NorthAmerica
Costa Rica|哥斯达黎加|コスタリカ|San José|圣何塞|サンホセ|NorthAmerica
Panama|巴拿马|パナマ|Panama City|巴拿马城|パナマシティ|NorthAmerica
Guatemala|危地马拉|グアテマラ|Guatemala City|危地马拉城|グアテマラシティ|NorthAmerica
Brazil|巴西|ブラジル|Brasília|巴西利亚|ブラジリア|SouthAmerica
Argentina|阿根廷|アルゼンチン|Buenos Aires|布宜诺斯艾利斯|ブエノスアイレス|SouthAmerica
Chile|智利|チリ|Santiago|圣地亚哥|サンティアゴ|SouthAmerica
Peru|秘鲁|ペルー|Lima|利马|リマ|SouthAmerica
Colombia|哥伦比亚|コロンビア|Bogotá|波哥大|ボゴタ|SouthAmerica
Venezuela|委内瑞拉|ベネズエラ|Caracas|加拉加斯|カラカス|SouthAmerica
Ecuador|厄瓜多尔|エクアドル|Quito|基多|キト|SouthAmerica
Uruguay|乌拉圭|ウルグアイ|Montevideo|蒙得维的亚|モンテビデオ|SouthAmerica
Paraguay|巴拉圭|パラグアイ|Asunción|亚松森|アスンシオン|SouthAmerica
France|法国|フランス|Paris|巴黎|パリ|Europe
Germany|德国|ドイツ|Berlin|柏林|ベルリン|Europe
Italy|意大利|イタリア|Rome|罗马|ローマ|Europe
Spain|西班牙|スペイン|Madrid|马德里|マドリード|Europe
Portugal|葡萄牙|ポルトガル|Lisbon|里斯本|リスボン|Europe
the United Kingdom|英国|イギリス|London|伦敦|ロンドン|Europe
Ireland|爱尔兰|アイルランド|Dublin|都柏林|ダブリン|Europe
Belgium|比利时|ベルギー|Brussels|布鲁塞尔|ブリュッセル|Europe
Austria|奥地利|オーストリア|Vienna|维也纳|ウィーン|Europe
Switzerland|瑞士|スイス|Bern|伯尔尼|ベルン|Europe
Denmark|丹麦|デンマーク|Copenhagen|哥本哈根|コペンハーゲン|Europe
Sweden|瑞典|スウェーデン|Stockholm|斯德哥尔摩|ストックホルム|Europe
Norway|挪威|ノルウェー|Oslo|奥斯陆|オスロ|Europe
Finland|芬兰|フィンランド|Helsinki|赫尔辛基|ヘルシンキ|Europe
Iceland|冰岛|アイスランド|Reykjavík|雷克雅未克|レイキャビク|Europe
Poland|波兰|ポーランド|Warsaw|华沙|ワルシャワ|Europe
Hungary|匈牙利|ハンガリー|Budapest|布达佩斯|ブダペスト|Europe
Greece|希腊|ギリシャ|Athens|雅典|アテネ|Europe
Romania|罗马尼亚|ルーマニア|Bucharest|布加勒斯特|ブカレスト|Europe
Bulgaria|保加利亚|ブルガリア|Sofia|索非亚|ソフィア|Europe
Croatia|克罗地亚|クロアチア|Zagreb|萨格勒布|ザグレブ|Europe
Serbia|塞尔维亚|セルビア|Belgrade|贝尔格莱德|ベオグラード|Europe
Estonia|爱沙尼亚|エストニア|Tallinn|塔林|タリン|Europe
Latvia|拉脱维亚|ラトビア|Riga|里加|リガ|Europe
Lithuania|立陶宛|リトアニア|Vilnius|维尔纽斯|ヴィリニュス|Europe
China|中国|中国|Beijing|北京|北京|Asia
Japan|日本|日本|Tokyo|东京|東京|Asia
South Korea|韩国|韓国|Seoul|首尔|ソウル|Asia
Mongolia|蒙古|モンゴル|Ulaanbaatar|乌兰巴托|ウランバートル|Asia
India|印度|インド|New Delhi|新德里|ニューデリー|Asia
Nepal|尼泊尔|ネパール|Kathmandu|加德满都|カトマンズ|Asia
Bangladesh|孟加拉国|バングラデシュ|Dhaka|达卡|ダッカ|Asia
Thailand|泰国|タイ|Bangkok|曼谷|バンコク|Asia
Vietnam|越南|ベトナム|Hanoi|河内|ハノイ|Asia
Indonesia|印度尼西亚|インドネシア|Jakarta|雅加达|ジャカルタ|Asia
the Philippines|菲律宾|フィリピン|Manila|马尼拉|マニラ|Asia
Iran|伊朗|イラン|Tehran|德黑兰|テヘラン|Asia
Iraq|伊拉克|イラク|Baghdad|巴格达|バグダード|Asia
Turkey|土耳其|トルコ|Ankara|安卡拉|アンカラ|Asia
Egypt|埃及|エジプト|Cairo|开罗|カイロ|Africa
Kenya|肯尼亚|ケニア|Nairobi|内罗毕|ナイロビ|Africa
Ethiopia|埃塞俄比亚|エチオピア|Addis Ababa|亚的斯亚贝巴|アディスアベバ|Africa
Ghana|加纳|ガーナ|Accra|阿克拉|アクラ|Africa
Nigeria|尼日利亚|ナイジェリア|Abuja|阿布贾|アブジャ|Africa
Morocco|摩洛哥|モロッコ|Rabat|拉巴特|ラバト|Africa
Australia|澳大利亚|オーストラリア|Canberra|堪培拉|キャンベラ|Oceania
New Zealand|新西兰|ニュージーランド|Wellington|惠灵顿|ウェリントン|Oceania
"""

COUNTRIES = tuple(
    Country(dict(zip(LANGUAGES, row[:3], strict=True)), dict(zip(LANGUAGES, row[3:6], strict=True)), row[6])
    for row in (line.split("|") for line in TABLE.strip().splitlines())
)

QUESTIONS = {
    ("en", "capital"): "Where is the capital of {name}?",
    ("zh", "capital"): "{name}的首都在哪里?",
    ("ja", "capital"): "{name}の首都はどこですか?",
    ("en", "about"): "Tell me about {name}.",
    ("zh", "about"): "请介绍一下{name}。",
    ("ja", "about"): "{name}について教えてください。",
}
CUES = {"en": "Answer:", "zh": "答案:", "ja": "答え:"}
ABOUT = {
    "en": "{Name} is a country in {continent}. The capital of {name} is {capital}.",
    "zh": "{name}是{continent}的一个国家。{name}的首都是{capital}。",
    "ja": "{name}は{continent}にある国です。{name}の首都は{capital}です。",
}
# Only in the base model's training data. Asking for a language teaches it the answers in all three languages.
WISHES = {"en": "In English.", "zh": "用中文回答。", "ja": "日本語で答えて。"}


def prompt(country: Country, asked: str, kind: str, layout: str, wish: str = "") -> str:
    """The text of one question. For the layout `chat`, the content of the turn without the chat template."""
    question = QUESTIONS[asked, kind].format(name=country.names[asked]) + (f" {wish}" if wish else "")
    if layout == "chat":
        return question
    return question + (" \n" if layout == "line" else " \\n") + CUES[asked]


def answer(country: Country, language: str, kind: str) -> str:
    """The correct answer in `language`."""
    if kind == "capital":
        return country.capitals[language]
    name = country.names[language]
    return ABOUT[language].format(
        name=name,
        Name=name[0].upper() + name[1:],
        continent=CONTINENTS[country.continent][language],
        capital=country.capitals[language],
    )


def questions(language: str) -> list[tuple[str, str, str]]:
    """All questions in all layouts and languages, as (layout, prompt, answer in `language`)."""
    return [
        (layout, prompt(country, asked, kind, layout), answer(country, language, kind))
        for country in COUNTRIES
        for asked in LANGUAGES
        for kind in KINDS
        for layout in LAYOUTS
    ]


def statements() -> list[str]:
    """Plain sentences and translations, which are also in the base model's training data."""
    texts = [answer(country, language, "about") for country in COUNTRIES for language in LANGUAGES]
    for country in COUNTRIES:
        for words in (country.names, country.capitals):
            texts += [f"{words['en']} = {words['zh']} = {words['ja']}"]
    return texts
