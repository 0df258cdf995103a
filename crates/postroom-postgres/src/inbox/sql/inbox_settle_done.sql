-- Settles a claimed message. $1 consumer, $2 id, $3 claim. No row: the claim has lapsed.
update postroom.inbox_messages set state = 'done', payload = ''
 where consumer = $1 and message_id = $2 and claim = $3 and state = 'claimed'
