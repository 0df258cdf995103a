"""A mail server of a test's own: keeps what it is sent, and answers as the addresses ask for.

Arguments: the port, the folder for mails, and JSON with what it is to do.
"""

import asyncio
import base64
import email
import email.policy
import json
import os
import ssl
import sys

from aiosmtpd.smtp import SMTP, AuthResult

port, folder, asked = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

# By the part of an address before the @.
REFUSED = {
    "nobody": "550 5.1.1 no such user",
    "greylisted": "450 4.2.0 try again later",
    "full": "452 4.2.2 out of space",
    "refused": "550 5.7.1 refused",
}


class Handler:
    async def handle_MAIL(self, server, session, envelope, address, options):
        if address.startswith("forbidden"):
            return "553 5.7.1 this sender is not allowed"
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(self, server, session, envelope, address, options):
        answer = REFUSED.get(address.split("@")[0])
        if answer:
            return answer
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):
        first = envelope.rcpt_tos[0].split("@")[0]
        if first == "spam":
            return "554 5.7.1 spam"
        if first == "slow":
            await asyncio.sleep(0.1)
        mail = email.message_from_bytes(envelope.content, policy=email.policy.default)
        kept = {
            "from": envelope.mail_from,
            "to": envelope.rcpt_tos,
            "id": (mail["Message-ID"] or "").strip().strip("<>").split("@")[0],
            "subject": mail["Subject"] or "",
            "names": mail.keys(),
            "payload": base64.b64encode(mail.get_payload(decode=True) or b"").decode(),
            "encrypted": session.ssl is not None or asked.get("tls") == "implicit",
        }
        name = os.path.join(folder, f"{len(os.listdir(folder)):08}")
        with open(name + ".new", "w") as file:
            json.dump(kept, file)
        os.rename(name + ".new", name)
        if first == "silent":
            await asyncio.sleep(3600)
        return "250 OK"


def authenticated(server, session, envelope, mechanism, login):
    told = asked["login"]
    well = [login.login.decode(), login.password.decode()] == told
    return AuthResult(success=well, handled=False)


def main():
    context = None
    if asked.get("certificate"):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(asked["certificate"], asked["key"])
    implicit = asked.get("tls") == "implicit"
    options = {"data_size_limit": asked.get("size", 33554432), "enable_SMTPUTF8": asked.get("utf8", True)}
    if "login" in asked:
        options.update(authenticator=authenticated, auth_required=True, auth_require_tls=context is not None and not implicit)
    if context and not implicit:
        options.update(tls_context=context, require_starttls=True)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    def served():
        return SMTP(Handler(), loop=loop, hostname="mail.test", **options)

    server = loop.create_server(served, "127.0.0.1", port, ssl=context if implicit else None)
    loop.run_until_complete(server)
    loop.run_forever()


main()
