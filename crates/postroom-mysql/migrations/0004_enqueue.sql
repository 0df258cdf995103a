-- Writing from any language: `call postroom_enqueue('orders', 'order.placed', payload, json_object('key', 'o-17'))` in the transaction of the
-- business rows. Afterwards @postroom_id is the id of the message. Options: id, key, routing_key, content_type, headers, tenant_id, aggregate_type,
-- aggregate_id, aggregate_version, delay_seconds.
create procedure if not exists postroom_enqueue(
    in p_topic   varchar(256) character set utf8mb4,
    in p_type    varchar(256) character set utf8mb4,
    in p_payload longblob,
    in p_options longtext character set utf8mb4
)
    modifies sql data
    sql security invoker
begin
    declare given longtext character set utf8mb4 default coalesce(p_options, '{}');
    declare option_names longtext character set utf8mb4;
    -- Letters are told apart.
    declare name varchar(128) character set utf8mb4 collate utf8mb4_bin;
    declare kind varchar(32) character set utf8mb4 collate utf8mb4_bin;
    declare header_values longtext character set utf8mb4;
    declare said varchar(128) character set utf8mb4;
    declare n int default 0;
    if not json_valid(given) or json_type(given) <> 'OBJECT' then
        signal sqlstate '45000' set message_text = 'postroom_enqueue: the options must be a JSON object';
    end if;
    set option_names = json_keys(given);
    while n < json_length(option_names) do
        set name = left(json_unquote(json_extract(option_names, concat('$[', n, ']'))), 64);
        if name not in ('id', 'key', 'routing_key', 'content_type', 'headers', 'tenant_id', 'aggregate_type', 'aggregate_id', 'aggregate_version',
                        'delay_seconds') then
            set said = concat('postroom_enqueue: there is no option ', name);
            signal sqlstate '45000' set message_text = said;
        end if;
        set kind = json_type(json_extract(given, concat('$.', name)));
        if kind is null then
            set said = concat('postroom_enqueue: write the option ', name, ' without escapes');
            signal sqlstate '45000' set message_text = said;
        end if;
        if kind = 'NULL' then
            set given = json_remove(given, concat('$.', name));
        elseif not case name when 'headers' then kind = 'OBJECT'
                             when 'aggregate_version' then kind in ('INTEGER', 'UNSIGNED INTEGER')
                             when 'delay_seconds' then kind in ('INTEGER', 'UNSIGNED INTEGER', 'DOUBLE', 'DECIMAL')
                             else kind = 'STRING' end then
            set said = concat('postroom_enqueue: the option ', name, ' cannot be of the type ', kind);
            signal sqlstate '45000' set message_text = said;
        end if;
        set n = n + 1;
    end while;
    set header_values = coalesce(json_extract(given, '$.headers.*'), '[]');
    set n = 0;
    while n < json_length(header_values) do
        if json_type(json_extract(header_values, concat('$[', n, ']'))) <> 'STRING' then
            signal sqlstate '45000' set message_text = 'postroom_enqueue: the values of headers must be text';
        end if;
        set n = n + 1;
    end while;
    insert into postroom_outbox (id, topic, type, payload, `key`, routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                                 aggregate_version, visible_at)
    values (coalesce(json_unquote(json_extract(given, '$.id')), ''), p_topic, p_type, p_payload, json_unquote(json_extract(given, '$.key')),
            json_unquote(json_extract(given, '$.routing_key')),
            coalesce(json_unquote(json_extract(given, '$.content_type')), 'application/octet-stream'), json_extract(given, '$.headers'),
            json_unquote(json_extract(given, '$.tenant_id')), json_unquote(json_extract(given, '$.aggregate_type')),
            json_unquote(json_extract(given, '$.aggregate_id')), json_extract(given, '$.aggregate_version'),
            if(json_extract(given, '$.delay_seconds') > 0,
               timestampadd(microsecond, cast(json_extract(given, '$.delay_seconds') * 1000000 as signed), utc_timestamp(6)), null));
end
